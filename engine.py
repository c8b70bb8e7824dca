"""The engine: a process that runs vLLM for an EngineClient (rollout.py), one step after another.

    socket ─► reader thread ─► command queue ─► main thread: Engine.run() ─ responses, each as it finishes ─► socket
                                                     │ admit prompt groups ◄── preprocessor thread
                                                     │ one vLLM step
                                                     ▼
                                 the model (worker.py): TP 1 in this process, TP > 1 in one process per GPU

A prompt group costs one multimodal preprocessing, beside earlier steps or, where the client prepares, before the call;
and one prefill: its N responses are N child requests that share the prompt's KV blocks. Groups are admitted in the
order given, before a step as many as it computes whole, and waited for where their preprocessing is late: so a
generate() call on an idle engine forms the same batches whenever it is repeated, prepared or not.

Run:
    python rollout.py                 # a demonstration; rollout.EngineClient alone starts `engine.py --serve FD`
Left out on purpose: speculative decoding.
To tune vLLM, edit _engine_args(); to change which prompts share a step, edit Engine._admit().
"""

import ctypes
import gc
import hashlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

if parent := os.environ.get("ROLLPLEX_PARENT"):
    # An engine and its workers (spawned, so they run this file first) must not outlive what started them: have the
    # kernel send SIGKILL when that thread ends. Before the imports below, because they take seconds.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it ended before the line above
        os._exit(3)
    gc.disable()  # importing makes a million objects and no garbage to speak of; worker.imported() ends it

import torch

import hardware
from rollout import FORBIDDEN_BIAS, Interval, Request, Response, Setup, Stats, receive_message

HEARTBEAT_S = 2.0  # a generating engine reports at least this often, so that silence means trouble
AHEAD = 16  # prompt groups preprocessed before their turn; each holds its pixels, 27 MB for 1500 tokens


# ---- requests in progress --------------------------------------------------------------------------------------------


@dataclass
class _Child:
    """One response in progress."""

    call: int
    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Group:
    """A prompt group that vLLM does not have yet."""

    call: int
    request: Request
    prompt: Future | None = None  # vLLM's own form of it, from when its preprocessing was ordered

    def cancel(self) -> None:
        """Spare the preprocessing that has not begun."""
        if self.prompt is not None:
            self.prompt.cancel()


class _Refused(Exception):
    """A command that cannot be carried out now; the engine stays usable."""


class Engine:
    """The loop of an engine process: commands in, responses out, one vLLM step at a time."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.commands: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.prepared: dict[str, _Group] = {}  # request id -> what the next generate() may begin with, of no call yet
        self.pending: deque[_Group] = deque()  # accepted, not yet admitted
        self.children: dict[str, _Child] = {}  # vLLM's request id -> response in progress
        self.unfinished: dict[int, int] = {}  # call -> responses still owed
        self.refusals: dict[int, list[str]] = {}
        self.stats = Stats()
        self.version, self.kv_released, self.running, self.last_sent = 0, False, False, 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def build(self) -> None:
        """Import vLLM, map the snapshot, allocate KV, and report readiness."""
        _, self.setup = self.commands.get()  # ("configure", setup)
        started = time.monotonic()
        if self.setup.cores:  # before vLLM's threads exist, so that they inherit it
            os.sched_setaffinity(0, {core for cores in self.setup.cores for core in cores})
            torch.set_num_threads(self.setup.config.cpu_threads)
        import worker  # not at the top: it must find vLLM where a spawned worker, which runs this file, imports it

        worker.layout(asdict(self.setup.binding))  # what is wrong with it shows before the slow part
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        worker.imported()
        imported = time.monotonic()
        self.llm = LLMEngine.from_engine_args(EngineArgs(**_engine_args(self.setup)))
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self._hold_two_steps_of_features()
        threads = torch.get_num_threads()
        self.preprocessor = ThreadPoolExecutor(1, "preprocessor", lambda: torch.set_num_threads(threads))
        workers = self._on_report()
        if outside := [name for report in workers for name in report["outside"]]:
            raise RuntimeError(f"{len(outside)} engine parameters lie outside the shared snapshot: {outside[:5]}")
        self.running = True
        ready = {"parameters": len(workers[0]["parameters"]), "kv_bytes": workers[0]["kv_bytes"]}
        ready["kv_tokens"] = self.llm.vllm_config.cache_config.num_gpu_blocks * self.setup.config.block_tokens
        self._send("ready", ready | {"import_s": imported - started, "build_s": time.monotonic() - imported})

    def run(self) -> None:
        """Serve until told to stop. Commands are taken between steps; an idle engine sleeps in the queue."""
        while self.running:
            if not self.commands.empty() or not self._busy():
                self._execute(*self.commands.get())
                continue
            if self.pending:
                self._admit()
            self._step()
        self.llm.engine_core.shutdown()

    def _hold_two_steps_of_features(self) -> None:
        """Give the scheduler's encoder cache room for the features of two steps' media.

        A GPU engine schedules a step before the one in flight has given its features up. Without room for both, vLLM
        cuts the new prompts before their media, and then each of their responses computes its prompt by itself.
        """
        cache, config = self.scheduler.encoder_cache_manager, self.setup.config
        tokens = 2 * max(config.max_num_batched_tokens, self.setup.max_prompt_tokens)
        self.scheduler.encoder_cache_manager = type(cache)(max(tokens, cache.cache_size))

    def _busy(self) -> bool:
        # The scheduler keeps a finished request for one more step; idle means that the workers have forgotten it too.
        return bool(self.pending or self.children or self.scheduler.has_requests())

    def _read(self) -> None:
        try:
            while (command := receive_message(self.connection)) != ("stop",) or self.running:
                self.commands.put(command)
            os._exit(0)  # told to stop while still building, which nothing can interrupt
        except (EOFError, OSError):
            os._exit(3)  # the trainer is gone; the main thread may be deep in a step

    def _send(self, *message) -> None:
        self.connection.send(message)
        self.last_sent = time.monotonic()

    # -- commands --

    def _execute(self, command: str, *arguments) -> None:
        carry_out = getattr(self, f"_on_{command}")
        if command in ("stop", "prepare", "generate", "abort"):  # nobody waits for an answer
            carry_out(*arguments)
            return
        call, *rest = arguments
        try:
            self._send("answer", call, True, carry_out(*rest))
        except _Refused as refused:
            self._send("answer", call, False, str(refused))

    def _on_stop(self) -> None:
        self.running = False

    def _on_prepare(self, requests: list[Request]) -> None:
        """In place of what is left of the last such order; as many as _look_ahead() takes at once."""
        for group in self.prepared.values():
            group.cancel()
        self.prepared = {request.id: _Group(0, request) for request in requests}
        self._look_ahead(self.prepared.values())

    def _on_generate(self, call: int, requests: list[Request]) -> None:
        self.unfinished[call], self.refusals[call] = sum(request.n for request in requests), []
        for request in requests:
            group = _Group(call, request)
            if request.media is None:
                assert request.id in self.prepared, f"request {request.id} came without its media, nor was it prepared"
                early = self.prepared.pop(request.id)
                group = _Group(call, replace(request, media=early.request.media), early.prompt)
            self.pending.append(group)
        self._on_prepare([])  # the rest was for this call alone
        if not requests:
            self._count_down(call, 0)

    def _on_abort(self) -> None:
        aborted, self.children = self.children, {}
        self.llm.engine_core.abort_requests(list(aborted))
        for child in aborted.values():
            self._respond(child, "abort")
        while self.pending:
            group = self.pending.popleft()
            group.cancel()
            for index in range(group.request.n):
                self._respond(_Child(group.call, group.request.id, index), "abort")

    def _on_publish(self, version: int) -> None:
        """Drop what depends on the weights: K and V in the prefix cache, vision features in the encoder cache.

        The multimodal caches hold preprocessed pixels, which do not depend on weights; _engine_args() switches them
        off, and they are dropped here all the same, so that switching them on cannot become a fault.
        """
        self._drop_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.reset_encoder_cache()
        self.version = version

    def _drop_prefix_cache(self) -> None:
        if self.children or self.pending:
            raise _Refused(f"{len(self.children) + len(self.pending)} requests are running; wait() or abort() first")
        while self.scheduler.has_requests():  # one more step, in which the workers forget what has finished
            self._step()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM holds KV blocks although no request runs")

    def _on_release_kv(self) -> list[dict[str, int]]:
        self._drop_prefix_cache()  # its blocks are about to lose their contents
        self.kv_released = True
        return self.llm.collective_rpc("rollplex_map_kv", args=(False,))

    def _on_restore_kv(self) -> list[dict[str, int]]:
        self.kv_released = False
        return self.llm.collective_rpc("rollplex_map_kv", args=(True,))

    def _on_log_memory(self, paths: list[str], headers: list[dict], sample_ms: float) -> None:
        self.llm.collective_rpc("rollplex_log_memory", args=(paths, headers, sample_ms))

    def _on_report(self) -> list[dict[str, Any]]:
        return self.llm.collective_rpc("rollplex_report")

    def _on_positions(self, request: Request) -> tuple[list[int], list[list[int]]]:
        self._look_ahead([group := _Group(0, request)])
        ready = self._ready(group)
        arguments = (ready.prompt_token_ids, ready.mm_features or [])
        return ready.prompt_token_ids, self.llm.collective_rpc("rollplex_positions", args=arguments)[0]

    # -- generation --

    def _admit(self) -> None:
        """Hand vLLM as many pending groups, in order, as its next step computes whole beside a token for each response
        in progress; at least one, so that none waits for ever.

        What is admitted together depends on lengths alone, never on how long preprocessing takes.
        """
        start_ns, admitted = time.monotonic_ns(), 0
        room = self.setup.config.max_num_batched_tokens - len(self.children)
        while self.pending:
            self._look_ahead(self.pending)
            group = self.pending[0]
            try:
                if self.kv_released:
                    raise _Refused("the KV cache is released; call restore_kv() first")
                ready = self._ready(group)
            except _Refused as refused:
                self.pending.popleft()
                self.refusals[group.call].append(f"{group.request.id}: {refused}")
                self._count_down(group.call, group.request.n)
                continue
            p = len(ready.prompt_token_ids)
            # The first child computes the prompt; each of the others what is behind its full blocks, at least a token.
            room -= p + (group.request.n - 1) * (1 + (p - 1) % self.setup.config.block_tokens)
            if admitted and room < 0:
                break
            self.pending.popleft()
            self._add_children(group, ready)
            admitted += 1
        self._look_ahead(self.pending)
        self._record("preprocess", start_ns, 0)

    def _look_ahead(self, groups: Iterable[_Group]) -> None:
        """Have the first of them preprocessed, in the one background thread."""
        for group in islice(groups, AHEAD):
            if group.prompt is None:
                group.prompt = self.preprocessor.submit(self._preprocess, group.request)

    def _add_children(self, group: _Group, ready) -> None:
        """Hand vLLM the n requests of one group. ready: what _ready() made of it."""
        call, request = group.call, group.request
        self._send("prompt", request.id, ready.prompt_token_ids)
        for index in range(request.n):
            child = copy(ready)
            child.request_id = child.external_req_id = f"{call}/{request.id}/{index}"
            child.sampling_params = ready.sampling_params.clone()
            child.sampling_params.seed = _seed(request.seed, index)
            if request.lengths is not None:
                child.sampling_params.max_tokens = request.lengths[index]
            self.children[child.request_id] = _Child(call, request.id, index)
            self.llm.engine_core.add_request(child)

    def _preprocess(self, request: Request):
        """vLLM's own form of a prompt: placeholders expanded, pixels normalised and cut into patches.

        It depends on neither weights nor sampling, so it may be made long before they are known.
        """
        config = self.llm.model_config.hf_config
        kinds = {config.image_token_id: "image", config.video_token_id: "video"}
        placed, given = [kinds[i] for i in request.prompt_ids if i in kinds], [kind for kind, _, _ in request.media]
        if placed != given:
            raise ValueError(f"the prompt has placeholders for {placed or 'no media'}, the request {given or 'none'}")
        return self.llm.renderer.render_cmpl([_prompt(request)])[0]

    def _ready(self, group: _Group):
        """vLLM's own form of a request, once its prompt is preprocessed."""
        sampling, tasks = _sampling_params(self.setup, group.request), self.llm.get_supported_tasks()
        try:
            prompt = group.prompt.result()
            ready = self.llm.input_processor.process_inputs(group.request.id, prompt, sampling, tasks)
        except ValueError as error:  # longer than the model's limit, a medium larger than max_num_batched_tokens, …
            raise _Refused(error) from error
        if (p := len(ready.prompt_token_ids)) > self.setup.max_prompt_tokens:
            raise _Refused(f"the prompt has {p} tokens, media included; the limit is {self.setup.max_prompt_tokens}")
        return ready

    def _step(self) -> None:
        """One vLLM step over everything admitted; sends the responses that finished in it."""
        start_ns, tokens, finished = time.monotonic_ns(), 0, []
        outputs = self.llm.engine_core.get_output().outputs
        prefill = any(r.num_computed_tokens < r.num_prompt_tokens for r in self.scheduler.running)
        for output in outputs:
            if (child := self.children.get(output.request_id)) is None:
                continue  # aborted while its last step was in flight
            prefill |= not child.token_ids
            tokens += len(output.new_token_ids)
            child.token_ids += output.new_token_ids
            child.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # column 0 is the sampled token
            if output.prefill_stats is not None:
                self.stats.prompt_tokens += output.prefill_stats.num_prompt_tokens
                self.stats.cached_tokens += output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                finished.append((self.children.pop(output.request_id), str(output.finish_reason)))
        if outputs or prefill:
            self._record("prefill" if prefill else "decode", start_ns, tokens)
        for child, reason in finished:
            self._respond(child, reason)
        if tokens and time.monotonic() - self.last_sent > HEARTBEAT_S:
            self._send("heartbeat")

    def _respond(self, child: _Child, reason: str) -> None:
        assert len(child.logprobs) == len(child.token_ids), "a token without its log-probability"
        self.stats.output_tokens += len(child.token_ids)
        finished_ns = time.monotonic_ns()
        drawn = child.token_ids, child.logprobs
        self._send("response", Response(child.request_id, child.index, *drawn, reason, self.version, finished_ns))
        self._count_down(child.call, 1)

    def _count_down(self, call: int, responses: int) -> None:
        self.unfinished[call] -= responses
        if self.unfinished[call] == 0:
            del self.unfinished[call]
            stats, self.stats = self.stats, Stats()
            self._send("done", call, self.refusals.pop(call), stats)

    def _record(self, kind: str, start_ns: int, tokens: int) -> None:
        end_ns, line, steps = time.monotonic_ns(), self.stats.timeline, 1
        if line and line[-1].kind == kind:
            last = line.pop()
            start_ns, steps, tokens = last.start_ns, last.steps + 1, last.tokens + tokens
        line.append(Interval(kind, start_ns, end_ns, steps, tokens))


def _engine_args(setup: Setup) -> dict[str, Any]:
    """vLLM's arguments. A GPU replays captured graphs; otherwise they are the same as on a CPU."""
    config, binding, gpu = setup.config, setup.binding, hardware.device().type == "cuda"
    return {
        "model": binding.model_dir,
        "dtype": binding.dtype,
        "max_model_len": setup.max_prompt_tokens + config.max_new_tokens,
        "tensor_parallel_size": config.tp,
        "load_format": "rollplex",
        "model_loader_extra_config": asdict(binding),
        "worker_extension_cls": "worker.EngineExtension",
        "logprobs_mode": "processed_logprobs",
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),  # so that nothing is profiled beside a co-tenant
        "block_size": config.block_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": True,  # lets a group's responses share the prompt
        "mm_processor_kwargs": setup.processor_kwargs or None,
        # A group is preprocessed once anyway; and of two videos with one cached, the other would get its metadata.
        "mm_processor_cache_gb": 0,
        "mm_encoder_tp_mode": "data",  # the vision tower is replicated, as in the trainer
        "skip_mm_profiling": True,
        "enforce_eager": not gpu,
        # Decode steps replay captured graphs, whose addresses lie in arenas. Compiling as well would take a minute.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if gpu else {},
        # Only a check at start-up that so much is free; the sizes that count are given above.
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "seed": 0,
    }


def _sampling_params(setup: Setup, request: Request):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    config = setup.config
    return SamplingParams(
        max_tokens=config.max_new_tokens,
        temperature=config.temperature if request.temperature is None else request.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=_seed(request.seed, 0),
        # With given lengths. vLLM's min_tokens would take the end token out of the distribution that is sampled from.
        ignore_eos=request.lengths is not None,
        logprobs=0,  # of the sampled token alone
        logit_bias=dict.fromkeys(setup.forbidden_ids, FORBIDDEN_BIAS) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _prompt(request: Request) -> dict[str, Any]:
    """A request as vLLM's prompt: ids with one placeholder a medium, frames as they are, never resampled."""
    from PIL import Image

    images = [Image.fromarray(frames[0]) for kind, frames, _ in request.media if kind == "image"]
    videos, metadata = [], []
    for kind, frames, fps in request.media:
        if kind == "video":
            about = {"fps": fps, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
            about |= {"duration": len(frames) / fps, "video_backend": "rollplex"}
            metadata.append(about)
            videos.append((frames, about | {"do_sample_frames": False}))
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
    if request.media:
        prompt["multi_modal_data"] = {k: v for k, v in (("image", images), ("video", videos)) if v}
    if videos:
        # vLLM 0.26 drops the pair's metadata for this model; only so does the real rate reach the temporal positions.
        prompt["mm_processor_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
    return prompt


def _seed(request_seed: int, index: int) -> int:
    """A response's own seed, 63 bits, mixed so that neighbouring request seeds share no stream."""
    digest = hashlib.blake2b(f"{request_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def main() -> None:
    """`--serve FD` is how EngineClient starts an engine."""
    if sys.argv[1:2] != ["--serve"]:
        sys.exit("engine.py is started by rollout.EngineClient; python rollout.py shows one at work")
    os.environ["ROLLPLEX_PARENT"] = str(os.getpid())  # for the workers
    engine = Engine(Connection(int(sys.argv[2])))
    code = 0
    try:
        engine.build()
        engine.run()
    except Exception:
        traceback.print_exc()
        engine.connection.send(("failed", traceback.format_exc()))
        code = 1
    os._exit(code)  # the interpreter's own clean-up would take seconds, and the kernel ends the workers


if __name__ == "__main__":
    main()

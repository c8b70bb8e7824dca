"""The engine: a process that runs vLLM on the trainer's weights and answers its EngineClient (rollout.py).

    EngineClient ── socket ──► reader thread ─► command queue ─► main thread: Engine.run()
         ▲                                                         │ admit prompt groups ◄── preprocessor thread
         └───────── responses, each as it finishes ────────────────┤ one vLLM step
                                                                   ▼
                                     TP 1: model in this process; TP > 1: one worker process per GPU
                                                                   │
                               arena snapshot  ◄───────────────────┘ every parameter is a view of it

No memory is allocated for weights: a registered loader builds vLLM's model with parameters that have none, maps the
trainer's snapshot and puts a view of it behind each.

A prompt group costs one multimodal preprocessing, beside earlier steps or, where the client prepares, before the call;
and one prefill: its N responses are N child requests that share the prompt's KV blocks, and each is sent the moment it
finishes. Groups are admitted in the order given, before a step as many as it computes whole, and waited for where their
preprocessing is late: so a generate() call on an idle engine forms the same batches whenever it is repeated, prepared
or not. A response's random stream is the same whatever it is batched with; a GPU and a CPU draw different ones from one
seed (_draw_in_one_kernel).

Run:
    python rollout.py                 # a demonstration; rollout.EngineClient alone starts `engine.py --serve FD`
Left out on purpose: speculative decoding.
To tune vLLM, edit _engine_args(); to change which prompts share a step, edit Engine._admit().
"""

import ctypes
import gc
import hashlib
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if parent := os.environ.get("ROLLPLEX_PARENT"):
    # An engine and its workers (spawned, so they run this file first) must not outlive what started them: have the
    # kernel send SIGKILL when that thread ends. Before the imports below, because they take seconds.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it ended before the line above
        os._exit(3)
    gc.disable()  # importing makes a million objects and no garbage to speak of; _imported() ends it

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hardware
import memory
import weights
from arena import Arena, align, attach
from rollout import FORBIDDEN_BIAS, Interval, Request, Response, Setup, Stats, receive_message

HEARTBEAT_S = 2.0  # a generating engine reports at least this often, so that silence means trouble
AHEAD = 16  # prompt groups preprocessed before their turn; each holds its pixels, 27 MB for 1500 tokens


# ---- engine process --------------------------------------------------------------------------------------------------


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
            os.sched_setaffinity(0, {core for worker in self.setup.cores for core in worker})
            torch.set_num_threads(self.setup.config.cpu_threads)
        _layout(asdict(self.setup.binding))  # what is wrong with it shows before the slow part
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        _imported()
        imported = time.monotonic()
        self.llm = LLMEngine.from_engine_args(EngineArgs(**_engine_args(self.setup)))
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self._hold_two_steps_of_features()
        threads = torch.get_num_threads()
        self.preprocessor = ThreadPoolExecutor(1, "preprocessor", lambda: torch.set_num_threads(threads))
        workers = self._on_report()
        if outside := [name for worker in workers for name in worker["outside"]]:
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
        if command == "stop":
            self.running = False
        elif command == "prepare":
            self._prepare(*arguments)
        elif command == "generate":
            self._accept(*arguments)
        elif command == "abort":
            self._abort()
        else:
            call, *rest = arguments
            try:
                self._send("answer", call, True, getattr(self, f"_on_{command}")(*rest))
            except _Refused as refused:
                self._send("answer", call, False, str(refused))

    def _prepare(self, requests: list[Request]) -> None:
        """In place of what is left of the last such order; as many as _look_ahead() takes at once."""
        for group in self.prepared.values():
            group.cancel()
        self.prepared = {request.id: _Group(0, request) for request in requests}
        self._look_ahead(self.prepared.values())

    def _accept(self, call: int, requests: list[Request]) -> None:
        self.unfinished[call], self.refusals[call] = sum(request.n for request in requests), []
        for request in requests:
            group = _Group(call, request)
            if request.media is None:
                assert request.id in self.prepared, f"request {request.id} came without its media, nor was it prepared"
                early = self.prepared.pop(request.id)
                group = _Group(call, replace(request, media=early.request.media), early.prompt)
            self.pending.append(group)
        self._prepare([])  # the rest was for this call alone
        if not requests:
            self._count_down(call, 0)

    def _abort(self) -> None:
        self.llm.engine_core.abort_requests(list(self.children))
        for child in [self.children.pop(name) for name in list(self.children)]:
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
        return self.llm.collective_rpc("rollplex_release_kv")

    def _on_restore_kv(self) -> list[dict[str, int]]:
        self.kv_released = False
        return self.llm.collective_rpc("rollplex_restore_kv")

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
            raise _Refused(f"the prompt has placeholders for {placed or 'no media'}, the request has {given or 'none'}")
        try:
            return self.llm.renderer.render_cmpl([_prompt(request)])[0]
        except ValueError as error:
            raise _Refused(error) from error

    def _ready(self, group: _Group):
        """vLLM's own form of a request, once its prompt is preprocessed."""
        prompt, sampling = group.prompt.result(), _sampling_params(self.setup, group.request)
        try:
            tasks = self.llm.get_supported_tasks()
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
        what = child.request_id, child.index, child.token_ids, child.logprobs, reason, self.version, finished_ns
        self._send("response", Response(*what))
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


# Decode steps replay captured graphs; nothing is compiled, which would take a minute. Captured addresses lie in arenas.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def _engine_args(setup: Setup) -> dict[str, Any]:
    """vLLM's arguments, the same on a CPU and on a GPU."""
    config, binding, gpu = setup.config, setup.binding, hardware.device().type == "cuda"
    return {
        "model": binding.model_dir,
        "dtype": binding.dtype,
        "max_model_len": setup.max_prompt_tokens + config.max_new_tokens,
        "tensor_parallel_size": config.tp,
        "load_format": "rollplex",
        "model_loader_extra_config": asdict(binding),
        "worker_extension_cls": "engine.EngineExtension",
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
        "compilation_config": _GRAPHS if gpu else {},
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


# ---- engine worker: the process that holds the model -----------------------------------------------------------------


def _layout(binding: dict[str, Any]) -> weights.Layout:
    """The trainer's layout of a rollout rank's snapshot, from the fields of Binding. ValueError if the sizes differ."""
    from transformers import AutoConfig

    config, dtype = AutoConfig.from_pretrained(binding["model_dir"]), getattr(torch, binding["dtype"])
    plan = weights.layout(config, binding["train_tp"], len(binding["handles"]), binding["qkv"], dtype)
    if plan.nbytes != binding["nbytes"]:
        raise ValueError(f"the trainer's snapshot has {binding['nbytes']} bytes, the engine's layout {plan.nbytes}")
    return plan


class _WithoutMemory(TorchDispatchMode):
    """While a model is built: what its parameters are made of has shape and type, but no memory (device "meta").

    vLLM 0.26 makes the parameters of this model with torch.empty and torch.ones on its device, and nothing else that it
    keeps: caches and scales come from other functions and stay real. check() finds out if that ever changes.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.made_bytes = device, 0  # bytes of every real tensor, those included that live for a moment

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        makes = function in (aten.empty.memory_format, aten.ones.default)
        if makes and torch.device(kwargs.get("device") or "cpu").type == self.device.type:
            return function(*args, **kwargs | {"device": torch.device("meta")})
        result = function(*args, **kwargs)
        if all(value.alias_info is None for value in function._schema.returns):  # neither a view nor written in place
            values = result if isinstance(result, tuple | list) else (result,)
            self.made_bytes += sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and not v.is_meta)
        return result

    @staticmethod
    def check(model: torch.nn.Module) -> None:
        """RuntimeError naming the tensors of a bound model that still have no memory."""
        left = [
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name, value in (vars(module) | module._parameters | module._buffers).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if left:
            why = "vLLM makes them the way it makes parameters; engine._WithoutMemory must tell them apart"
            raise RuntimeError(f"{len(left)} tensors of the engine's model have no memory, {left[:5]}: {why}")


def _register_loader() -> None:
    """Make load_format="rollplex" known to vLLM: map this rank's snapshot instead of allocating and loading weights."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader import register_model_loader, utils
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    @register_model_loader("rollplex")
    class SnapshotLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        def load_model(self, vllm_config, model_config, prefix: str = "") -> torch.nn.Module:
            """As in vLLM, but between building and binding, parameters have no memory."""
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(model_config.dtype), device:
                with _WithoutMemory(device) as building:
                    model = utils.initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                kept = sum(p.nbytes for p in model.parameters() if not p.is_meta)
                model.rollplex_loading = {"parameter_bytes": kept, "made_bytes": building.made_bytes}
                self.load_weights(model, model_config)
                building.check(model)
                utils.process_weights_after_loading(model, model_config, device)
            return model.eval()

        def load_weights(self, model, model_config) -> None:
            binding = self.load_config.model_loader_extra_config
            snapshot = attach(binding["handles"][get_tensor_model_parallel_rank()], binding["nbytes"])
            weights.bind_engine(model, snapshot, _layout(binding))
            model.rollplex_snapshot = snapshot
            hardware.empty_cache()
            _unlink_cpu_communicator()


def _place_kv_in_arena() -> None:
    """Have vLLM's model runners take the KV cache from an arena region, so that its pages can come and go."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's runner inherits from it

    def allocate(runner, kv_cache_config) -> dict[str, torch.Tensor]:
        tensors = kv_cache_config.kv_cache_tensors
        if any(tensor.block_stride > 0 for tensor in tensors):
            raise NotImplementedError("a KV cache whose layers are interleaved in one allocation")
        runner.rollplex_kv = Arena({"kv": sum(align(tensor.size) for tensor in tensors)})
        region, offset, named = runner.rollplex_kv.acquire("kv").zero_().view(torch.int8), 0, {}
        for tensor in tensors:
            named |= dict.fromkeys(tensor.shared_by, region[offset : offset + tensor.size])
            offset += align(tensor.size)
        return named

    GPUModelRunner._allocate_kv_cache_tensors = allocate


def _draw_in_one_kernel() -> None:
    """Have vLLM draw all tokens of a step with its own kernel gumbel_sample, which takes a seed and a position per row.

    Its sampler would launch a kernel for each seeded request (vLLM 0.26, random_sample). A draw depends on the seed of
    its response and the index of its token alone, not on its row or the batch. The index is the offset of the
    response's generator, in steps of 4: by so much vLLM winds it back when it discards the token of a prompt that was
    cut. A CPU keeps vLLM's way, so that the same seeds draw other tokens there.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    def draw(sampler, logits: torch.Tensor, generators: dict[int, torch.Generator], k, p):
        """forward_native() in logprobs_mode processed_logprobs: tokens int64 [B], log-probabilities float32 [B, V].

        logits [B, V], bias and temperature applied. A row without a generator is greedy; the caller has its token.
        """
        logits, rows = apply_top_k_top_p(logits, k, p), len(logits)
        # Seeds, then indices, each padded to an even number: Triton compiles another kernel for another alignment.
        table = [[0] * (rows + rows % 2) for _ in range(2)]
        for row, generator in generators.items():
            offset = generator.get_offset()
            table[0][row], table[1][row] = generator.initial_seed(), offset // 4
            generator.set_offset(offset + 4)
        seeds, indices = hardware.upload(torch.from_numpy(np.array(table)))  # 4 times as fast as torch.tensor
        row_numbers, ones = torch.arange(rows, device=logits.device), logits.new_ones(rows)
        tokens = gumbel_sample(logits, row_numbers, ones, seeds, indices, False, use_fp64=sampler.use_fp64_gumbel)
        return tokens, logits.log_softmax(-1, torch.float32)

    TopKTopPSampler.forward_native = draw


def _unlink_cpu_communicator() -> None:
    """Remove the names of vLLM's CPU tensor-parallel segments, which a killed worker would leave in /dev/shm.

    Every rank has mapped them when weights are loaded; the memory lives as long as the mappings.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{identity}-*-cpushm_*"):
            path.unlink(missing_ok=True)


def _imported() -> None:
    """vLLM has been imported, by the engine or a worker: make it ours, and collect garbage from here on.

    What is there by now stays for good; not searching it time and again makes start-up a third shorter (measured, CPU).
    """
    _register_loader()
    _place_kv_in_arena()
    if hardware.gpu_host():  # not hardware.device(), which would start CUDA before a worker has chosen its GPU
        _draw_in_one_kernel()
    gc.freeze()
    gc.enable()


if "vllm" in sys.modules:  # imported by a vLLM worker, for EngineExtension and before it loads the model
    _imported()


class EngineExtension:
    """Methods that vLLM adds to each worker (worker_extension_cls), called through collective_rpc."""

    def rollplex_report(self) -> dict[str, Any]:
        """Addresses of the parameters and of the snapshot, what the process holds, and what building the model took.

        loading: {parameter_bytes: of parameters that had memory of their own, made_bytes: of all real tensors made}.
        """
        model = self.model_runner.get_model()
        low, size = model.rollplex_snapshot.data_ptr(), model.rollplex_snapshot.numel()
        places = {name: (p.data_ptr(), p.numel() * p.element_size()) for name, p in model.named_parameters()}
        ends = {name: (start, start + nbytes) for name, (start, nbytes) in places.items()}
        return {
            "pid": os.getpid(),
            "parameters": places,
            "snapshot": (low, size),
            "outside": [name for name, (start, end) in ends.items() if not low <= start < end <= low + size],
            "loading": model.rollplex_loading,
            "kv_bytes": self.model_runner.rollplex_kv.nbytes("kv"),
            "kv_resident_bytes": self.model_runner.rollplex_kv.resident_bytes("kv"),
            "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE,
        }

    def rollplex_log_memory(self, paths: list[str], headers: list[dict], sample_ms: float) -> None:
        """Sample what this worker holds on its device until the process ends."""

        def read() -> tuple[str, dict[str, int]]:
            arena = self.model_runner.rollplex_kv
            kv_bytes = arena.nbytes("kv") if arena.mapped("kv") else 0
            return "engine", {"rollout_kv": kv_bytes, "engine_other": hardware.allocator_bytes()}

        self.rollplex_memory_log = memory.MemoryLog(Path(paths[self.rank]), headers[self.rank], read, sample_ms)

    def rollplex_release_kv(self) -> dict[str, int]:
        """Give back the pages of the KV cache, and what the allocator keeps for later; addresses stay, also those in
        captured graphs."""

        def release(arena: Arena) -> None:
            arena.release("kv")
            hardware.empty_cache()

        return self._rollplex_kv(release)

    def rollplex_restore_kv(self) -> dict[str, int]:
        """Put pages behind the KV cache again. Their contents mean nothing: the prefix cache was dropped at release."""
        return self._rollplex_kv(lambda arena: arena.acquire("kv"))

    def _rollplex_kv(self, change: Callable[[Arena], Any]) -> dict[str, int]:
        arena = self.model_runner.rollplex_kv
        before, others = arena.resident_bytes("kv"), {"other_before": hardware.allocator_bytes()}
        change(arena)
        if hasattr(self, "rollplex_memory_log"):
            self.rollplex_memory_log.sample()
        after = arena.resident_bytes("kv")
        others |= {"other_bytes": hardware.allocator_bytes(), "host_bytes": hardware.host_bytes()}
        return {"kv_bytes": arena.nbytes("kv"), "resident_before": before, "resident_after": after} | others

    def rollplex_positions(self, prompt_ids: list[int], mm_features: list) -> list[list[int]]:
        """M-RoPE positions [3, P] as the model runner computes them."""
        return self.model_runner.get_model().get_mrope_input_positions(prompt_ids, mm_features)[0].tolist()


def _serve(fd: int) -> None:
    os.environ["ROLLPLEX_PARENT"] = str(os.getpid())  # for the workers
    engine = Engine(Connection(fd))
    try:
        engine.build()
        engine.run()
        code = 0
    except Exception:
        traceback.print_exc()
        engine.connection.send(("failed", traceback.format_exc()))
        code = 1
    os._exit(code)  # the interpreter's own clean-up would take seconds, and the kernel ends the workers


def main() -> None:
    """`--serve FD` is how EngineClient starts an engine."""
    if sys.argv[1:2] != ["--serve"]:
        sys.exit("engine.py is started by rollout.EngineClient; python rollout.py shows one at work")
    _serve(int(sys.argv[2]))


if __name__ == "__main__":
    import engine  # so that a class has one identity here and where vLLM imports EngineExtension

    engine.main()

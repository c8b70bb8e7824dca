"""Rollout: an engine as the trainer sees it: what it is asked and answers, and the client that starts and drives it.

    trainer rank e                                engine e = python engine.py --serve FD
    ┌──────────────────────────────┐  socketpair  ┌────────────────────────────────────────────┐
    │ EngineClient                 │              │ Engine, again and again:                   │
    │  sender thread  ─────────────│─ commands ─► │   take commands, admit prompt groups,      │
    │  reader thread ◄─────────────│─ responses ─ │   one vLLM step, send what has finished    │
    └───────────────┬──────────────┘              └───────────────────┬────────────────────────┘
                    │ writes θk+1                                     │ reads θk
                    ▼                                                 ▼
             arena snapshot  ◄──────────── every engine parameter is a view of it (worker.py)

The engine never receives weights: an optimizer step is visible to it the moment it is written. What must be told is
that the weights changed: publish() drops what was computed from the old ones. Weights may only be written while no
request runs (barrier 3); publish() refuses otherwise.

Each response of a prompt group is sent the moment it finishes. A generate() call that is repeated on an idle engine
gives the same responses: the batches are the same, and each response has its own random stream, derived from the
request's seed and its index. In other batches there remains the backend's rounding, which depends on their shape.
(Do not ask for greedy and drawn responses at once: on a CPU, vLLM 0.26 then draws without the seeds.)
prepare() lets an engine preprocess the prompts of the next generate() beforehand, and changes nothing else.

Log-probabilities are those of the distribution that was sampled from: log_softmax((logits + bias) / temperature) in
float32, bias before temperature, where bias is FORBIDDEN_BIAS for the forbidden ids and 0 elsewhere (vLLM 0.26: logits
processors, temperature, top-k/top-p, log_softmax, in v1/sample/sampler.py on a CPU; v1/worker/gpu/sample/sampler.py on
a GPU, in float32 because of worker._sample_in_float32). Temperature 0 is greedy and leaves the
division out. With top_p or top_k the removed ids are -inf before that log_softmax: the values are renormalised over the
kept set and no longer comparable with the trainer's. Both are off by default.

A killed trainer takes its engines with it (parent-death signal, and end of file on the socket). A killed or silent
engine raises EngineDied in the trainer with its phase, exit code, last message and the tail of its log.

Run:
    python rollout.py                 # a tiny random model in an arena, one engine, a synthetic clip; 5 to 50 s
    python rollout.py --help
Left out on purpose: sleep mode (with shared weights only KV needs releasing, and that lies in an arena region).
To tune the engine, edit RolloutConfig and engine.py's _engine_args(); to swap it, answer the tuples that EngineClient
sends as engine.Engine does.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro

import hardware
from arena import Arena

FORBIDDEN_BIAS = -100.0  # the trainer adds the same, so that both compute the same function
REAP_S = 5.0  # how long an exit may take before it is forced


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are generated and what an engine may use."""

    tp: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 1
    """Tensor-parallel degree of an engine; set by the trainer (rollout_tp)."""
    n: int = 8
    """Responses per prompt (the group size N of GRPO)."""
    max_new_tokens: int = 48
    """Most tokens of a response, the end token included; a longer one is cut and has finish_reason "length"."""
    temperature: float = 1.0
    """Sampling temperature, 0 (greedy) to 2 (vLLM's limit). The trainer divides its logits by the same value."""
    top_p: float = 1.0
    """Keep the smallest set of ids with this probability, in (0, 1]; 1 keeps all. Otherwise log-probabilities are
    renormalised over the set."""
    top_k: int = 0
    """Keep the k most likely ids; 0 keeps all. Otherwise log-probabilities are renormalised over the k."""
    kv_cache_gib: float = 0.25
    """KV cache of one GPU (of one engine worker on a CPU), GiB; must hold the longest prompt with its response."""
    block_tokens: int = 32
    """Tokens of a KV block, a multiple of 32; the full blocks of a prompt are shared by its N responses."""
    max_num_seqs: int = 64
    """Most responses decoded at once by one engine; the others wait."""
    max_num_batched_tokens: int = 4096
    """Most tokens of one engine step: as many whole prompts as fit are prefilled together, which bounds the activation
    memory of their vision tower and prefill. A prompt that does not fit is cut over steps; on a CPU vLLM fails then."""
    cpu_threads: int = 1
    """CPU only: cores of each engine worker; engine 0 takes the first, engine 1 the next, and around again."""
    start_timeout_s: float = 300.0
    """Longest time from starting an engine to its readiness, seconds (8 to 40 for a tiny model on its own core)."""
    silence_timeout_s: float = 120.0
    """An engine that owes an answer and says nothing for this many seconds is killed and reported."""

    def __post_init__(self):
        whole = ("tp", "n", "max_new_tokens", "max_num_seqs", "max_num_batched_tokens", "cpu_threads")
        rules = [(name, getattr(self, name) >= 1, "at least 1") for name in whole]
        sizes = ("kv_cache_gib", "start_timeout_s", "silence_timeout_s")
        rules += [(name, getattr(self, name) > 0, "above 0") for name in sizes]
        rules += [
            ("temperature", 0 <= self.temperature <= 2, "0 (greedy) to 2"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("block_tokens", self.block_tokens > 0 and self.block_tokens % 32 == 0, "a positive multiple of 32"),
        ]
        for name, ok, expected in rules:
            if not ok:
                raise ValueError(f"--rollout.{name.replace('_', '-')} {getattr(self, name)}: expected {expected}")


@dataclass(frozen=True)
class Binding:
    """What an engine maps instead of loading weights: the arguments of weights.layout(), and where the bytes are."""

    model_dir: str  # configuration, tokenizer and processor; weights in it are not read
    handles: tuple[str, ...]  # Arena.handle of the snapshot of rollout rank 0, 1, …
    nbytes: int  # of one rank's snapshot
    train_tp: int
    qkv: str  # fused or split
    dtype: str  # float32 or bfloat16


@dataclass
class Setup:
    """What an engine is told once, before it starts vLLM."""

    config: RolloutConfig
    binding: Binding
    max_prompt_tokens: int
    forbidden_ids: list[int]
    processor_kwargs: dict[str, Any]
    cores: list[list[int]]  # of each worker; empty on a GPU


@dataclass
class Request:
    """One prompt group: `n` responses to one prompt."""

    id: str
    prompt_ids: list[int]  # one placeholder id per image or video
    media: Sequence[Any]  # data.Media, in the order of their placeholders
    n: int
    seed: int  # with a response's index, determines its random stream
    temperature: float | None = None  # in place of RolloutConfig's, 0 (greedy) for an evaluation say
    lengths: tuple[int, ...] | None = None  # [n] tokens of each response, the end token being one like any other


@dataclass
class Response:
    """One finished (or aborted) response. P is the prompt's length with its placeholders expanded, S the response's."""

    request_id: str
    index: int  # 0 … n−1 in its group
    token_ids: list[int]  # [S], with the end token if there was one
    logprobs: list[float]  # [S] rollout log-probabilities of token_ids
    finish_reason: str  # stop, length or abort
    version: int  # of the published weights it was sampled from
    finished_ns: int  # time.monotonic_ns(), one clock for every process of a host
    prompt_ids: list[int] = field(default_factory=list)  # [P] the engine's expansion; [] if aborted before it


class Interval(NamedTuple):
    """Adjacent engine steps of one kind."""

    kind: str  # preprocess (waiting for it), prefill (steps with any prompt work) or decode
    start_ns: int
    end_ns: int
    steps: int
    tokens: int  # response tokens sampled


@dataclass
class Stats:
    """What an engine did since the last take_stats()."""

    timeline: list[Interval] = field(default_factory=list)
    prompt_tokens: int = 0  # over all responses
    cached_tokens: int = 0  # of those, taken from KV blocks that another response had filled
    output_tokens: int = 0

    @property
    def seconds(self) -> float:
        """From the first to the last work of the engine; 0 if it did none."""
        work = self.timeline
        return (max(w.end_ns for w in work) - min(w.start_ns for w in work)) / 1e9 if work else 0.0

    def busy(self, kind: str) -> tuple[float, int]:
        """Seconds and engine steps of one kind of work."""
        work = [interval for interval in self.timeline if interval.kind == kind]
        return sum(w.end_ns - w.start_ns for w in work) / 1e9, sum(w.steps for w in work)

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(
            self.timeline + other.timeline,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class EngineDied(RuntimeError):
    """An engine process ended or fell silent; the message says where and why, and shows the end of its log."""


# ---- client: lives in the trainer rank that started the engine -------------------------------------------------------


class EngineClient:
    """Starts an engine and drives it. The constructor returns at once; ready() waits.

    Create it in a thread that lives as long as the trainer: the kernel ends the engine when that thread ends. Commands
    come from one thread; stop() may come from any, and from a signal handler. Methods raise EngineDied once the engine
    is gone, and RuntimeError where it refuses a command and stays usable. Only two threads of its own touch the socket,
    so that no caller hangs in it when an engine stops reading.
    """

    def __init__(
        self,
        config: RolloutConfig,
        binding: Binding,
        *,
        engine: int,  # number on this host; names its log and chooses its cores
        max_prompt_tokens: int,  # visual tokens included
        forbidden_ids: Sequence[int],  # never sampled
        run_dir: str | Path,  # for the log
        devices: Sequence[int] = (),  # local ranks whose GPUs its workers use, as binding.handles; unused on a CPU
        processor_kwargs: dict[str, Any] | None = None,  # as the trainer's processor gets them for every medium
    ):
        if len(binding.handles) != config.tp:
            raise ValueError(f"rollout.tp {config.tp} needs as many arena handles, got {len(binding.handles)}")
        self.config, self.engine = config, engine
        self.log_path = Path(run_dir) / f"engine{engine}.log"
        self._changed = threading.Condition()  # guards what the threads write: everything up to _ready
        self._responses: list[Response] = []
        self._stats = Stats()
        self._prompt_ids: dict[str, list[int]] = {}
        self._open_calls: set[int] = set()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._refusals: list[str] = []
        self._last_heard, self._last_message, self._reason = time.monotonic(), "none", ""
        self._sent = 0  # commands of those posted
        self._ready: dict[str, Any] | None = None
        self._order: dict[str, int] = {}  # request id -> position, for the order of wait()
        self._prepared: dict[str, Request] = {}  # whose prompts the engine has already, or is being sent
        self._outbox: queue.SimpleQueue[list | None] = queue.SimpleQueue()  # to the sender thread
        self._posted = 0  # commands
        self._calls, self._phase, self._started = 0, "start", time.monotonic()
        self._funeral = threading.RLock()  # one thread at a time ends the engine; reentrant for signal handlers
        self._died: EngineDied | None = None
        self._stopped = False
        cores = _cores(engine, config) if hardware.device().type == "cpu" else []
        self._start(_environment(cores) | hardware.visible_devices(devices))
        setup = Setup(config, binding, max_prompt_tokens, list(forbidden_ids), processor_kwargs or {}, cores)
        self._post(("configure", setup))

    @property
    def died(self) -> EngineDied | None:
        """Why the engine is gone, or None; stop() is no death. May be read from any thread."""
        return self._died

    @property
    def generating(self) -> bool:
        """Whether a generate() is not finished. Raises EngineDied if the engine is gone."""
        self._raise_if_gone()
        return bool(self._open_calls)

    def ready(self) -> dict[str, Any]:
        """Wait until the engine can generate: {start_s, import_s, build_s, parameters, kv_bytes, kv_tokens}."""
        self._wait_until(lambda: self._ready is not None, self._started + self.config.start_timeout_s)
        self._phase = "idle"
        return self._ready

    def prepare(self, requests: Sequence[Request]) -> None:
        """Have the engine preprocess prompts of the next generate() beforehand, and return at once.

        A request of that call has its prompt here if it has the same id, prompt ids and media, which are compared as
        objects and must not be written to in between; all else of it may differ. What that call does not use is
        dropped, and so is what an earlier prepare() left. Weights, KV cache and running requests are not touched.
        """
        self._raise_if_gone()
        self._post(("prepare", [_plain(request) for request in requests]))
        self._prepared = {request.id: request for request in requests}

    def generate(self, requests: Sequence[Request]) -> None:
        """Start generating and return at once; responses arrive through poll() and wait(), which frees the ids."""
        ids = [request.id for request in requests]
        if empty := [request.id for request in requests if request.n < 1]:
            raise ValueError(f"generate(): requests {empty} ask for no response; n must be at least 1")
        most = self.config.max_new_tokens
        for request in requests:
            given = request.lengths
            if given is not None and not (len(given) == request.n and all(1 <= length <= most for length in given)):
                expected = f"{request.n} from 1 to rollout.max_new_tokens {most}"
                raise ValueError(f"generate(): request {request.id} has lengths {given}; expected {expected}")
        if twice := sorted({i for i in ids if ids.count(i) > 1 or i in self._order}):
            raise ValueError(f"generate(): ids must differ from each other and from those not yet waited for: {twice}")
        self._order |= {name: len(self._order) + i for i, name in enumerate(ids)}
        self._calls += 1
        with self._changed:
            self._open_calls.add(self._calls)
        self._phase = "generate"
        there, self._prepared = self._prepared, {}
        lacking = [
            replace(request, media=None) if _same_prompt(request, there.get(request.id)) else _plain(request)
            for request in requests
        ]
        self._send(("generate", self._calls, lacking))

    def poll(self) -> list[Response]:
        """Responses that arrived since the last poll() or wait(), in order of arrival; never blocks."""
        with self._changed:
            self._raise_if_gone()
            taken, self._responses = self._responses, []
            return taken

    def wait(self) -> list[Response]:
        """Wait until every generate() is finished; what poll() has not returned, by request, then index."""
        self._wait_until(lambda: not self._open_calls)
        with self._changed:
            taken, self._responses = self._responses, []
            refusals, self._refusals = self._refusals, []
            self._prompt_ids.clear()
        taken.sort(key=lambda response: (self._order[response.request_id], response.index))
        self._order.clear()
        self._phase = "idle"
        if refusals:
            raise RuntimeError(f"engine {self.engine} refused a request: {'; '.join(refusals)}")
        return taken

    def wait_for_prompts(self) -> None:
        """Wait until the engine has taken every prompt of generate(), the last of which are then about to be prefilled;
        or until all are finished."""
        self._wait_until(lambda: len(self._prompt_ids) == len(self._order) or not self._open_calls)

    def abort(self) -> None:
        """Stop everything outstanding: wait() then also returns the partial responses, with finish_reason "abort"."""
        self._send(("abort",))

    def take_stats(self) -> Stats:
        """Timeline and token counts of the generate() calls that finished since the last take_stats()."""
        with self._changed:
            taken, self._stats = self._stats, Stats()
            return taken

    def publish(self, version: int) -> None:
        """The weights have changed: drop the prefix, multimodal and encoder caches. Refused while requests run."""
        self._ask("publish", version)

    def release_kv(self) -> list[dict[str, int]]:
        """Give the KV cache's memory back, addresses kept, and what the allocators hold for later.

        Per worker: {kv_bytes, resident_before, resident_after, other_before, other_bytes, host_bytes}: the last three
        of its process, besides the cache.
        """
        return self._ask("release_kv")

    def restore_kv(self) -> list[dict[str, int]]:
        """Make the KV cache usable again, empty; same report as release_kv(). Without effect if it was not released."""
        return self._ask("restore_kv")

    def log_memory(self, paths: Sequence[Path], headers: Sequence[dict], sample_ms: float) -> None:
        """Have each worker write a memory log (memory.MemoryLog): one path and header a worker."""
        self._ask("log_memory", [str(Path(path).resolve()) for path in paths], list(headers), sample_ms)

    def report(self) -> list[dict[str, Any]]:
        """Per worker: where each parameter lies, the snapshot's range, what is outside it, bytes resident, and bytes
        allocated while the model was built."""
        return self._ask("report")

    def positions(self, request: Request) -> tuple[list[int], torch.Tensor]:
        """The engine's expanded prompt ids [P] and M-RoPE positions int64 [3, P] of a request, without generating."""
        ids, rows = self._ask("positions", _plain(request))
        return ids, torch.tensor(rows)

    def stop(self) -> None:
        """End the engine and all it started, politely first; returns when nothing is left. Safe from any thread."""
        with self._funeral:
            self._stopped = True
            self._outbox.put(pack_message(("stop",)))
            self._outbox.put(None)
            self._sender.join(REAP_S)
            self._reap(0 if self._sender.is_alive() else REAP_S)  # what reads nothing will not obey either
        for thread in (self._sender, self._reader):
            thread.join(REAP_S)
        self._connection.close()

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    # -- process --

    def _start(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve().with_name("engine.py")), "--serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which then stops its engines in order
            )
        self._connection = Connection(ours.detach())
        name = f"engine {self.engine}"
        self._reader = threading.Thread(target=self._read, name=f"{name} reader", daemon=True)
        self._sender = threading.Thread(target=self._write, name=f"{name} sender", daemon=True)
        self._reader.start()
        self._sender.start()

    def _reap(self, grace_s: float) -> int | None:
        """Wait `grace_s` for the engine to exit, else kill it, and see its session gone; its exit code, if it has one.
        Takes at most `grace_s` + 2 REAP_S."""
        for wait_s in (grace_s, REAP_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
            if self.process.poll() is None:
                self.process.kill()
        # Workers get SIGKILL with their parent; the resource tracker then removes shared memory and exits.
        deadline = time.monotonic() + REAP_S
        while (left := _session_members(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.process.returncode

    def _die(self, what: str, grace_s: float) -> None:
        """End what is left of the engine and compose the one error that every caller gets from now on."""
        with self._funeral:
            if self._stopped or self._died:
                return
            code = self._reap(grace_s)
            last = f"{self._last_message}, {time.monotonic() - self._last_heard:.1f} s before"
            lines = [f"engine {self.engine} {what} in phase {self._phase!r}; exit code {code}; last message: {last}"]
            lines += [self._reason or "(it gave no reason)", f"last lines of {self.log_path}:"]
            lines += [f"  {line}" for line in self.log_path.read_text(errors="replace").splitlines()[-15:]]
            self._died = EngineDied("\n".join(lines))

    # -- messages --

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                with self._changed:
                    self._handle(*message)
                    self._changed.notify_all()
        except (EOFError, OSError):  # the other end is closed: the process is gone or going
            self._die("ended", REAP_S)
            with self._changed:
                self._changed.notify_all()

    def _handle(self, kind: str, *content) -> None:
        self._last_heard, self._last_message = time.monotonic(), kind
        if kind == "response":
            (response,) = content
            response.prompt_ids = self._prompt_ids.get(response.request_id, [])
            self._responses.append(response)
            self._last_message = f"response {response.index} to request {response.request_id}"
        elif kind == "prompt":
            self._prompt_ids[content[0]] = content[1]
        elif kind == "done":
            call, refusals, stats = content
            self._open_calls.discard(call)
            self._refusals += refusals
            self._stats += stats
        elif kind == "answer":
            self._answers[content[0]] = content[1:]
        elif kind == "ready":
            self._ready = content[0] | {"start_s": self._last_heard - self._started}
        elif kind == "failed":
            self._reason = content[0]

    def _ask(self, command: str, *arguments) -> Any:
        """Send a command and wait for its answer; RuntimeError if the engine refuses it."""
        outer, self._phase = self._phase, command
        self._calls += 1
        call = self._calls
        self._send((command, call, *arguments))
        self._wait_until(lambda: call in self._answers)
        self._phase = outer
        ok, value = self._answers.pop(call)
        if not ok:
            raise RuntimeError(f"engine {self.engine} refused {command}: {value}")
        return value

    def _send(self, message: tuple) -> None:
        """Have a command sent and wait until it is, after all that was posted before."""
        self._raise_if_gone()
        self._last_heard = time.monotonic()  # silence counts from when there is something to answer
        number = self._post(message)
        self._wait_until(lambda: self._sent >= number)

    def _post(self, message: tuple) -> int:
        """Give a command to the sender thread; its number."""
        self._outbox.put(pack_message(message))
        self._posted += 1
        return self._posted

    def _write(self) -> None:
        """One command after another, as fast as the engine reads them; while it does not, only this thread waits."""
        with contextlib.suppress(OSError):  # the engine is gone, as the reader thread will find and report
            while (parts := self._outbox.get()) is not None:
                for part in parts:
                    self._connection.send_bytes(part)
                with self._changed:
                    self._sent += 1
                    self._changed.notify_all()

    def _wait_until(self, true: Callable[[], bool], deadline: float | None = None) -> None:
        """Wait for what reader and sender thread do, to a deadline or else as long as the engine is heard of."""
        with self._changed:
            while not true():
                self._raise_if_gone()
                limit = deadline or self._last_heard + self.config.silence_timeout_s
                if (left := limit - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            else:
                return
        silent, late = "said nothing for too long (rollout.silence_timeout_s)", "was not ready in time"
        self._die(f"{late} (rollout.start_timeout_s)" if deadline else silent, 0)
        self._raise_if_gone()

    def _raise_if_gone(self) -> None:
        if self._stopped:
            raise EngineDied(f"engine {self.engine} was stopped in phase {self._phase!r}")
        if self._died is not None:
            raise self._died


def pack_message(message: tuple) -> list[bytes | memoryview]:
    """A command as what goes over the socket, in this order: its arrays apart from the rest and uncopied, so that the
    interpreter is not held up while they are sent."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    return [pickle.dumps((head, [part.nbytes for part in parts])), *parts]


def receive_message(connection: Connection) -> tuple:
    """The next command, made of what pack_message() gave. EOFError once nothing more can come."""
    head, sizes = connection.recv()
    arrays = [bytearray(nbytes) for nbytes in sizes]
    for array in arrays:
        connection.recv_bytes_into(array)
    return pickle.loads(head, buffers=arrays)


def _plain(request: Request) -> Request:
    """The request with its media as (kind, frames, fps), so that the engine need not import what defined them."""
    media = [(medium.kind, np.ascontiguousarray(medium.frames), float(medium.fps)) for medium in request.media]
    return replace(request, prompt_ids=list(request.prompt_ids), media=media)


def _same_prompt(request: Request, other: Request | None) -> bool:
    """Whether both have the same ids and the very same media, whose pixels nobody has to compare then."""
    if other is None or list(request.prompt_ids) != list(other.prompt_ids) or len(request.media) != len(other.media):
        return False
    return all(medium is its for medium, its in zip(request.media, other.media, strict=True))


def _cores(engine: int, config: RolloutConfig) -> list[list[int]]:
    """Cores of each worker of an engine. vLLM's own choice would put every engine on core 0."""
    available, width = sorted(os.sched_getaffinity(0)), config.cpu_threads
    first = engine * config.tp * width
    flat = [available[(first + i) % len(available)] for i in range(config.tp * width)]
    return [flat[j * width : (j + 1) * width] for j in range(config.tp)]


def _environment(cores: list[list[int]]) -> dict[str, str]:
    """The trainer's environment without what torchrun put there: an engine that sees it may try to join its group."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_", "OMP_NUM_THREADS")
    dropped += ("VLLM_CPU_KVCACHE_SPACE",)  # would override kv_cache_gib, in whole GiB
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= {
        "ROLLPLEX_PARENT": str(os.getpid()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in the engine process: one less to start and reap
        "VLLM_USE_V2_MODEL_RUNNER": "1" if hardware.gpu_host() else "0",  # worker._place_kv_in_arena() says why
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The model runs eagerly, yet vLLM would compile a helper of its sampler: 10 s of every start, 30 of the first.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if cores:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, worker)) for worker in cores)
    return environment


def _session_members(session: int) -> list[int]:
    """Living processes of a session: the engine was started as a session leader, so these are its own."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session, …
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(entry.name))
    return members


# ---- demonstration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Demo:
    rollout: RolloutConfig
    model: str = "tiny"
    """A named configuration (configs.py), with random weights."""
    prompts: int = 4
    """Prompt groups to generate."""
    frames: int = 8
    """Frames of the synthetic clip."""
    side: int = 112
    """Its height and width, pixels."""
    length: int = 0
    """Tokens of each response; 0: until it ends by itself, or at --rollout.max-new-tokens."""
    repeats: int = 1
    """Generations, one after the other. On a GPU the first also compiles kernels."""
    max_prompt_tokens: int = 2048
    """Longest prompt that the engine takes, visual tokens included."""


def _demo(args: _Demo) -> None:
    import tempfile
    from types import SimpleNamespace

    import configs

    if args.model not in configs.NAMES:
        raise ValueError(f"--model {args.model}: expected one of {', '.join(configs.NAMES)}")
    with tempfile.TemporaryDirectory() as root:
        config, binding, _arena, _ = random_weights(args.model, root)
        frames = np.random.default_rng(0).integers(0, 255, (args.frames, args.side, args.side, 3), dtype=np.uint8)
        clip = SimpleNamespace(kind="video", frames=frames, fps=2.0)
        visual = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
        # No two of 300 begin alike: their blocks of the KV cache are not shared.
        prompts = [[1, 60 + i % 300, *visual, *range(40, 60)] for i in range(args.prompts)]
        limits = {"max_prompt_tokens": args.max_prompt_tokens, "forbidden_ids": configs.forbidden_ids(config)}
        with EngineClient(args.rollout, binding, engine=0, devices=[0], run_dir=root, **limits) as client:
            print("engine ready:", {name: round(value, 1) for name, value in client.ready().items()})
            load = hardware.GpuLoad(lambda: "GPU")
            for repeat in range(args.repeats):
                client.publish(repeat)  # so that no prompt is in the prefix cache
                _generate_and_tell(client, args, prompts, clip)
                if found := load.take():
                    print("meanwhile", ", ".join(f"{name} {mean:.0f}" for name, mean in found.items()))


def random_weights(model: str, root: str | Path) -> tuple[Any, Binding, Arena, Any]:
    """A named configuration and random weights on the first device, BF16 on a GPU and FP32 on a CPU, for one engine of
    TP 1: transformers' configuration, the binding, the arena, which must live as long as the engine, and the
    weights.Snapshot in it."""
    import configs
    import weights

    directory = configs.make_model_dir(model, root)
    config = configs.load_config(str(directory))
    hardware.select_device(0)
    dtype = "bfloat16" if hardware.device().type == "cuda" else "float32"
    plan = weights.layout(config, 1, 1, "split", getattr(torch, dtype))
    arena = Arena({"snapshot": plan.nbytes})
    snapshot = weights.Snapshot(plan, 0, arena.acquire("snapshot"), None)
    weights.init_random(snapshot, 0, config)
    binding = Binding(str(directory), (arena.handle("snapshot"),), plan.nbytes, 1, "split", dtype)
    return config, binding, arena, snapshot


def _generate_and_tell(client: EngineClient, args: _Demo, prompts: list[list[int]], clip) -> None:
    n = args.rollout.n
    lengths = (args.length,) * n if args.length else None
    requests = [Request(f"{i}", ids, [clip], n, seed=i, lengths=lengths) for i, ids in enumerate(prompts)]
    start_ns = time.monotonic_ns()
    client.generate(requests)
    responses, stats = client.wait(), client.take_stats()
    seconds = (time.monotonic_ns() - start_ns) / 1e9
    first_s = (min(response.finished_ns for response in responses) - start_ns) / 1e9
    print(f"{len(responses)} responses to {len(responses[0].prompt_ids)}-token prompts in {seconds:.2f} s:")
    print(f"the first after {first_s:.2f} s, {stats.output_tokens / seconds:.0f} tokens/s")
    for kind in ("prefill", "decode"):
        busy_s, steps = stats.busy(kind)
        if steps:
            print(f"{kind}: {busy_s:.2f} s, {steps} engine steps of {1e3 * busy_s / steps:.2f} ms")
    shared = stats.cached_tokens / stats.prompt_tokens
    print(f"{shared:.0%} of the prompt tokens came from KV blocks shared in their group")


if __name__ == "__main__":
    import rollout  # so that a class has one identity here and where messages are unpickled

    args = tyro.cli(rollout._Demo, description=__doc__.split("\n\n")[0])
    try:
        rollout._demo(args)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"rollout.py: {error}")

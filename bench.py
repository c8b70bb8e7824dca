"""Tables and figures from what runs leave behind; `compare`, which needs a run of its own, is in compare.py.

    runs/a-s0/metrics.jsonl ┐                     ┌ reward.png       mean over seeds, band from lowest to highest seed
    runs/a-s1/metrics.jsonl ├─ bench.py curves ───┤ step_time.png    seconds per phase, stacked; they add up to the step
    runs/b-s0/metrics.jsonl ┘                     └ a table on the terminal
    runs/a-s0/trace.json    ─── bench.py trace ───┬ trace-step7.png  who did what when, one lane per rank and role
                                                  └ how much of each phase ran inside its own engine's decode
    runs/a-s0/memory-*.jsonl ── bench.py memory ──┬ memory.png       each GPU over time by object, and by role
                                                  └ the peak of each phase by object, beside the planner's
    runs/a-s0/metrics.jsonl ─── bench.py growth ──┬ growth.png       memory over steps with its fitted slope
                                                  └ MiB a step, with standard error and verdict

Runs whose names differ only in a trailing seed ("a-s0" and "a-s1", "a_seed3", "a-seed=4") are seeds of one group.

Run:
    CPU and GPU alike:  python bench.py curves runs/tiny-s0 runs/tiny-s1 runs/tiny-s2
                        python bench.py trace runs/tiny-s0 --step 7
                        python bench.py memory runs/tiny-s0 --step 7
                        python bench.py growth runs/tiny-s0
Left out on purpose: reading wandb, interactive plots (trace.json opens in ui.perfetto.dev).
To add a figure, add a dataclass with its fields, a function that computes the numbers and one that draws them, and name
the dataclass in `main`.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.ticker import MaxNLocator

_SEED = re.compile(r"[-_.]?s(eed)?[-_=]?\d+$")
_NEEDED = ("step", "reward_mean", "step_s")
_COLORS = {  # phases keep their colour from figure to figure; names not listed here take what is left of tab20
    "decode": "tab:blue",
    "prefill": "tab:cyan",
    "preprocess": "lightsteelblue",
    "prefill wait": "khaki",
    "rollout wait": "lightskyblue",
    "reference prefix": "tab:olive",
    "reference": "palegoldenrod",
    "actor prefix": "tab:red",
    "actor": "mistyrose",
    "actor suffix": "lightcoral",
    "backward": "tab:brown",
    "optimizer": "tab:purple",
    "publish": "plum",
    "barrier": "black",
    "other": "lightgray",
}
_SPARE = ("tab:green", "tab:pink", "tab:orange", "tab:gray", "gold", "darkseagreen", "sienna", "navy")

_OBJECTS = {  # tags of the memory logs, in the order in which they are stacked: what is always there lies lowest
    "snapshot": "tab:gray",
    "engine_weights": "tab:red",
    "engine_other": "lightsteelblue",
    "rollout_kv": "tab:blue",
    "reference": "palegoldenrod",
    "reference_boundary": "tab:olive",
    "actor_boundary": "tab:orange",
    "prefix_activations": "lightcoral",
    "suffix_activations": "tab:pink",
    "logprobs": "black",
    "gradient": "tab:brown",
    "optimizer_state": "tab:purple",
    "other": "lightgray",
}
_ROLES = {
    "shared weights": ("snapshot",),
    "rollout": ("rollout_kv", "engine_weights", "engine_other"),
    "reference": ("reference", "reference_boundary"),
    "actor": ("actor_boundary", "prefix_activations", "suffix_activations", "logprobs", "gradient"),
    "optimizer": ("optimizer_state",),
}
MIB = 2**20

Record = dict  # one line of metrics.jsonl
Groups = dict[str, list[list[Record]]]  # group name -> one list of records per seed


@dataclass(frozen=True)
class Curves:
    """Reward and step-time plots, and a table, from the metrics of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories. Seeds of one configuration (names that differ in a trailing -s0, -seed1) are averaged."""
    out: Path | None = None
    """Directory for reward.png and step_time.png. Default: the first run's."""
    smooth: int = 1
    """Average the reward over this many steps, the current one and those before it. 1: as measured."""


@dataclass(frozen=True)
class Trace:
    """Phase timeline of one step as a picture, and the share of each phase that ran inside engine decode."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    step: int | None = None
    """Step to draw, as numbered in metrics.jsonl. Default: the last one in the trace."""
    out: Path | None = None
    """PNG to write. Default: trace-step<N>.png in the run directory."""


@dataclass(frozen=True)
class Memory:
    """Device memory over time (the paper's Figure 8), and each phase's peak by object beside the planner's figure."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories. Several (ablations, say) are drawn side by side on one scale, each by its fullest GPU."""
    gpu: int | None = None
    """GPU to draw and print. Default: every GPU of a single run, up to four; of several runs the fullest."""
    step: int | None = None
    """Draw and print only this step, as numbered in metrics.jsonl (a single run with a trace)."""
    window: tuple[float, float] | None = None
    """Draw and print only these seconds, from and to, of each run's memory log. Default: all of it (drawn: of the
    start-up only the end)."""
    out: Path | None = None
    """PNG to write. Default: memory.png in the first run's directory."""


@dataclass(frozen=True)
class Growth:
    """Does memory grow? Least-squares slope of host and device memory over the steps of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    warm_up: float = 0.1
    """Share of the steps left out at the start, from 0 to below 1; the first step always is. An allocator that fills up
    and stays so shows as a slope that vanishes with a larger share."""
    tolerance_mib: float = 0.01
    """The verdict is "grows" when the whole 95 % interval lies above this, MiB a step (0.01: 10 MiB in 1000 steps).
    Above 0 because an allocator's few late steps have a slope too."""
    out: Path | None = None
    """PNG to write. Default: growth.png in the run directory."""


# ---- curves: numbers -------------------------------------------------------------------------------------------------


def read_metrics(run: Path) -> list[Record]:
    """Records of a run in step order; a step that a resumed run repeated counts once, as it was last.

    Raises ValueError if the run or its metrics are missing, empty or damaged. A torn last line is left out: the run may
    still be writing it.
    """
    path = _file_of(run, "metrics.jsonl")
    records: dict[int, Record] = {}
    for number, record in _json_lines(path):
        if missing := [key for key in _NEEDED if key not in record]:
            raise ValueError(f"{path} line {number} lacks {', '.join(missing)}: was it written by train.py?")
        records[record["step"]] = record
    if not records:
        raise ValueError(f"{path} has no step yet: wait for the first, or see the logs beside it if the run has ended")
    return [records[step] for step in sorted(records)]


def group_runs(runs: Iterable[Path]) -> Groups:
    """Runs by name without a trailing seed, in the order given."""
    groups: Groups = {}
    for run in runs:
        name = run.resolve().name
        groups.setdefault(_SEED.sub("", name) or name, []).append(read_metrics(run))
    return groups


def common_steps(seeds: list[list[Record]]) -> list[int]:
    """Steps that all seeds have."""
    steps = set.intersection(*({record["step"] for record in records} for records in seeds))
    if not steps:
        raise ValueError("these seeds have no step in common: draw them one by one, or wait until all have begun")
    return sorted(steps)


def reward_curve(seeds: list[list[Record]], smooth: int = 1) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and over the seeds the mean, lowest and highest reward_mean at each, after averaging `smooth` steps."""
    steps = common_steps(seeds)
    curves = []
    for records in seeds:
        values = [record["reward_mean"] for record in _at(records, steps)]
        curves.append([statistics.fmean(values[max(0, i + 1 - smooth) : i + 1]) for i in range(len(values))])
    points = list(zip(*curves, strict=True))
    return steps, [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]


def phase_seconds(seeds: list[list[Record]]) -> tuple[list[int], dict[str, list[float]]]:
    """Steps, and seconds of each phase at each step, averaged over seeds. "other" is what is left of step_s."""
    steps = common_steps(seeds)
    names: dict[str, None] = {}  # in order of appearance
    for record in (record for records in seeds for record in records):
        names |= {
            key.removeprefix("phase/"): None for key in record if key.startswith("phase/") and key != "phase/other"
        }
    aligned = [_at(records, steps) for records in seeds]
    phases = {
        name: [statistics.fmean(r.get(f"phase/{name}", 0.0) for r in row) for row in zip(*aligned, strict=True)]
        for name in names
    }
    totals = [statistics.fmean(r["step_s"] for r in row) for row in zip(*aligned, strict=True)]
    phases["other"] = [total - sum(p[i] for p in phases.values()) for i, total in enumerate(totals)]
    return steps, phases


def fold_small(phases: dict[str, list[float]], share: float = 0.02) -> dict[str, list[float]]:
    """Phases under `share` of all the time go into "other", so that a legend stays readable. The sums do not change."""
    total = sum(map(sum, phases.values()))
    small = [name for name, seconds in phases.items() if name == "other" or sum(seconds) < share * total]
    kept = {name: seconds for name, seconds in phases.items() if name not in small}
    return kept | {"other": [sum(values) for values in zip(*(phases[name] for name in small), strict=True)]}


def summary(seeds: list[list[Record]]) -> dict[str, str]:
    """One row of the table. Times and rates are medians without each seed's first step, which also warms up."""
    steps, mean, _, _ = reward_curve(seeds)
    tenth = max(1, len(steps) // 10)
    warm = [record for records in seeds for record in (records[1:] or records)]
    chance = seeds[0][-1].get("chance")
    worst = [r["logprob_diff_max"] for records in seeds for r in records if "logprob_diff_max" in r]
    return {
        "seeds": str(len(seeds)),
        "steps": str(len(steps)),
        "reward first 10%": f"{statistics.fmean(mean[:tenth]):.3f}",
        "last 10%": f"{statistics.fmean(mean[-tenth:]):.3f}",
        "chance": "n/a" if chance is None else f"{chance:.3f}",
        "step s": _median(warm, "step_s", ".2f"),
        "gen tok/s": _median(warm, "tok_s_generate", ".0f"),
        "train tok/s": _median(warm, "tok_s_train", ".0f"),
        "|dlogp| mean": _median(warm, "logprob_diff_mean", ".1e"),
        "max": f"{max(worst):.1e}" if worst else "n/a",
        "minutes": _median([records[-1] for records in seeds], "elapsed_s", ".1f", 1 / 60),
    }


# ---- curves: pictures ------------------------------------------------------------------------------------------------


def draw_reward(groups: Groups, path: Path, smooth: int) -> None:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    chances = {}
    for name, seeds in groups.items():
        steps, mean, low, high = reward_curve(seeds, smooth)
        label = name if len(seeds) == 1 else f"{name} (mean of {len(seeds)} seeds, band lowest to highest)"
        (line,) = axes.plot(steps, mean, label=label, linewidth=2, marker="." if len(steps) < 40 else None)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if (chance := seeds[0][-1].get("chance")) is not None:
            chances[chance] = None
    for chance in chances:
        axes.axhline(chance, color="black", linestyle="--", linewidth=1, label=f"chance {chance:.3g}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean reward" + (f", average of {smooth} steps" if smooth > 1 else ""))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_step_time(groups: Groups, path: Path) -> None:
    """One panel per group on one scale, which ends a little above the slowest step but the first."""
    curves_of = {}
    for name, seeds in groups.items():
        steps, phases = phase_seconds(seeds)
        curves_of[name] = steps, fold_small(phases)
    size = (4 + 4.5 * len(groups), 5)
    figure, panels = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False, layout="constrained")
    colors = _colors(name for _, phases in curves_of.values() for name in phases)
    top, areas = 0.0, {}
    for axes, (name, (steps, phases)) in zip(panels[0], curves_of.items(), strict=True):
        totals = [sum(values) for values in zip(*phases.values(), strict=True)]
        top = max(top, *(totals[1:] or totals))
        base = [0.0] * len(steps)
        for phase, values in phases.items():
            areas[phase] = axes.bar(steps, values, 1.0, base, color=colors[phase], linewidth=0)
            base = [b + v for b, v in zip(base, values, strict=True)]
        axes.set_title(name if len(totals) < 2 else f"{name}\nfirst step {totals[0]:.1f} s")
        axes.set(xlabel="step", xlim=(steps[0] - 0.5, steps[-1] + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0][0].set(ylabel="seconds a step, by phase of rank 0", ylim=(0, 1.15 * top))
    order = list(areas)[::-1]  # as they lie on each other
    figure.legend([areas[phase] for phase in order], order, loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- trace -----------------------------------------------------------------------------------------------------------


def read_trace(run: Path, step: int | None = None) -> tuple[int, list[dict]]:
    """The step (the last one if None) and its events, as events_by_step() returns them."""
    by_step = events_by_step(run)
    step = max(by_step) if step is None else step
    if step not in by_step:
        path = run / "trace.json"
        raise ValueError(f"{path} has no step {step}: --step takes {min(by_step)} to {max(by_step)}")
    return step, by_step[step]


def events_by_step(run: Path) -> dict[int, list[dict]]:
    """Complete ("X") Chrome trace events of each step, sorted by start; ts and dur in µs.

    Accepts what Perfetto accepts: an array, one without its end as a run leaves it, or {"traceEvents": [...]}.
    """
    path = _file_of(run, "trace.json")
    text = path.read_text().strip()
    if text.startswith("[") and not text.endswith("]"):
        text = text[: text.rfind("}") + 1] + "]" if "}" in text else "[]"
    try:
        content = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a Chrome trace ({error}): remove what follows its last whole event") from error
    events = content["traceEvents"] if isinstance(content, dict) else content
    by_step: dict[int, list[dict]] = {}
    for event in events:
        if event.get("ph") == "X" and "step" in event.get("args", {}):
            by_step.setdefault(event["args"]["step"], []).append(event)
    if not by_step:
        raise ValueError(f"{path} has no step yet: wait for the first, or see the logs beside it if the run has ended")
    return {step: sorted(found, key=lambda e: (e["ts"], -e["dur"])) for step, found in by_step.items()}


def lanes(events: list[dict]) -> dict[tuple, list[list[dict]]]:
    """Events by (pid, tid), engines above their trainer; a lane is rows without overlaps, nested events below."""
    out: dict[tuple, list[list[dict]]] = {key: [] for key in sorted({(e["pid"], e["tid"]) for e in events})}
    for event in events:  # sorted by start, the longer first
        rows = out[event["pid"], event["tid"]]
        for row in rows:
            if row[-1]["ts"] + row[-1]["dur"] <= event["ts"]:
                row.append(event)
                break
        else:
            rows.append([event])
    return out


def overlap_table(events: list[dict]) -> dict[tuple[int, str], tuple[float, float, float]]:
    """(rank, phase) -> seconds of the phase, of which its engine worked, of which the engine did nothing but decode.

    An engine step that also carries prompt tokens is a prefill. A rank is compared with the engine it started, and a
    rank that started none with all engines.
    """
    table: dict[tuple[int, str], tuple[float, float, float]] = {}
    engines = [e for e in events if e["tid"] != "train"]
    for event in sorted((e for e in events if e["tid"] == "train"), key=lambda e: (e["pid"], e["ts"])):
        own = [e for e in engines if e["pid"] == event["pid"]] or engines
        inside = [_covered(event, own), _covered(event, [e for e in own if e["name"] == "decode"])]
        key = event["pid"], event["name"]
        added = zip(table.get(key, (0.0, 0.0, 0.0)), (event["dur"], *inside), strict=True)
        table[key] = tuple(old + new / 1e6 for old, new in added)
    return table


def draw_trace(step: int, events: list[dict], path: Path) -> None:
    """Time counts from the trainer's first event; what an engine still did before that lies left of the axis."""
    origin = min((e["ts"] for e in events if e["tid"] == "train"), default=events[0]["ts"])
    length = (max(e["ts"] + e["dur"] for e in events) - origin) / 1e6
    rows_by_lane, colors = lanes(events), _colors(e["name"] for e in events)
    height = sum(map(len, rows_by_lane.values())) + 0.5 * len(rows_by_lane)
    figure, axes = plt.subplots(figsize=(13, 1.8 + 0.42 * height), layout="constrained")
    y, ticks, bars = 0.0, [], {}
    for (pid, lane), rows in rows_by_lane.items():
        ticks.append((y + (len(rows) - 1) / 2, f"rank {pid}\n{lane}"))
        for row in rows:
            for event in row:
                name, start, seconds = event["name"], (event["ts"] - origin) / 1e6, event["dur"] / 1e6
                bars[name] = axes.barh(y, seconds, 0.9, start, color=colors[name], edgecolor="white", linewidth=0.4)
                if start >= 0 and seconds > 0.0085 * length * len(name):  # the name fits into the bar
                    axes.text(start + seconds / 2, y, name, ha="center", va="center", fontsize=8)
            y += 1
        axes.axhline(y - 0.25, color="lightgray", linewidth=0.8)
        y += 0.5
    first_rank = min(pid for pid, _ in rows_by_lane)
    for event in events:
        if event["name"] == "barrier" and event["pid"] == first_rank:
            end, late = (event["ts"] + event["dur"] - origin) / 1e6, event["ts"] - origin > 0.8e6 * length
            axes.axvline(end, color="black", linestyle=":", linewidth=1)
            text = f" barrier {event['args'].get('before', '')} "
            axes.text(end, -0.7, text, fontsize=8, va="bottom", ha="right" if late else "left")
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.set(xlim=(0, length), ylim=(y - 0.5, -1.3), xlabel=f"seconds into step {step}")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(list(bars.values()), list(bars), loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What one GPU held over time, by object: step functions, each value holds until the next time. T samples."""

    gpu: int
    origin_ns: int  # the run's first sample, on the host's monotonic clock
    times_s: np.ndarray  # [T] ascending, since the origin
    end_s: float  # how long the last value held
    phases: list[str]  # [T] the trainer's: "1", "2", "3", "start-up" …
    bytes: dict[str, np.ndarray]  # object -> [T]
    capacity_bytes: int | None

    @property
    def total(self) -> np.ndarray:
        """Bytes of all objects together, [T]."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class _Log:
    """One process's memory log."""

    header: dict
    times_ns: np.ndarray  # [T]
    phases: list[str]
    bytes: dict[str, np.ndarray]

    def at(self, tag: str, times_ns: np.ndarray) -> np.ndarray:
        """Bytes of an object at given times; 0 before the first sample."""
        return np.concatenate([[0], self.bytes[tag]])[np.searchsorted(self.times_ns, times_ns, side="right")]


def read_devices(run: Path) -> list[Device]:
    """Every GPU of a run, from the memory logs of its trainer and engine processes.

    Raises ValueError if there are no logs, or one is empty or damaged; a torn last line is left out.
    """
    _check_run(run)
    ranks, engines = (sorted(run.glob(f"memory-{kind}*.jsonl")) for kind in ("rank", "engine"))
    if not ranks:
        raise ValueError(f"{run} has no memory-rank*.jsonl: was it run with --memory.sample-ms 0, or has it not begun?")
    logs: dict[int, list[_Log]] = {}
    for path in (*ranks, *engines):
        log = _read_log(path)
        logs.setdefault(log.header["gpu"], []).append(log)
    origin_ns = min(log.times_ns[0] for found in logs.values() for log in found)
    end_ns = max(log.times_ns[-1] for found in logs.values() for log in found)
    return [_merge(gpu, found, int(origin_ns), (end_ns - origin_ns) / 1e9) for gpu, found in sorted(logs.items())]


def _read_log(path: Path) -> _Log:
    (_, header), *lines = _json_lines(path) or [(1, {})]
    needed = {"process", "gpu", "capacity_bytes"}
    if missing := sorted(needed - header.keys()):
        raise ValueError(f"{path} line 1 lacks {', '.join(missing)}: was it written by train.py?")
    if not lines:
        raise ValueError(
            f"{path} has no sample yet: wait for the first, or see the logs beside it if the run has ended"
        )
    for number, line in lines:
        if missing := sorted({"t_ns", "phase", "bytes"} - line.keys()):
            raise ValueError(f"{path} line {number} lacks {', '.join(missing)}: was it written by train.py?")
    samples = [line | {"phase": _phase_at(line)} for _, line in lines]
    tags = {tag: None for line in samples for tag in line["bytes"]}
    held = {tag: np.array([line["bytes"].get(tag, 0) for line in samples], dtype=np.int64) for tag in tags}
    return _Log(header, np.array([line["t_ns"] for line in samples]), [line["phase"] for line in samples], held)


def _phase_at(line: dict) -> str:
    """A barrier's sample belongs to the phase that it opens."""
    return line["mark"].split()[1].rstrip(":") if line.get("mark", "").startswith("barrier ") else line["phase"]


def _merge(gpu: int, logs: list[_Log], origin_ns: int, end_s: float) -> Device:
    """One GPU's processes together. Memory that both report is counted once, as its owner reports it: what belongs to
    the rollout by the engine, the rest by the trainer; only "other" is each process's own. A trainer's is all that
    is in use on the GPU besides what it names, and so has the engine's "engine_other" in it."""
    engines = [log for log in logs if log.header["process"] == "engine"]
    trainers = [log for log in logs if log.header["process"] != "engine"]
    if not trainers:
        raise ValueError(f"GPU {gpu} has an engine's memory log and no trainer's: is memory-rank{gpu}.jsonl missing?")
    times_ns = np.unique(np.concatenate([log.times_ns for log in logs]))
    held = {}
    for tag in {tag: None for log in logs for tag in log.bytes}:
        first, second = (engines, trainers) if tag in _ROLES["rollout"] else (trainers, engines)
        owners = [log for log in first if tag in log.bytes] or [log for log in second if tag in log.bytes]
        held[tag] = sum(log.at(tag, times_ns) for log in (logs if tag == "other" else owners) if tag in log.bytes)
    if "other" in held and "engine_other" in held:
        held["other"] = np.maximum(0, held["other"] - held["engine_other"])
    phases = ["", *trainers[0].phases]
    now = np.searchsorted(trainers[0].times_ns, times_ns, side="right")
    capacity = trainers[0].header["capacity_bytes"]
    return Device(gpu, origin_ns, (times_ns - origin_ns) / 1e9, end_s, [phases[i] for i in now], held, capacity)


def cut(device: Device, start_s: float, end_s: float) -> Device:
    """The device from start_s to end_s; raises ValueError if it has no sample before the end."""
    first = max(0, int(np.searchsorted(device.times_s, start_s, side="right")) - 1)
    last = int(np.searchsorted(device.times_s, end_s, side="left"))
    if last <= first or start_s >= device.end_s:
        span = f"the log has {device.times_s[0]:.2f} to {device.end_s:.2f} s"
        raise ValueError(f"GPU {device.gpu} has no sample from {start_s:g} to {end_s:g} s: {span}")
    times_s = np.maximum(device.times_s[first:last], start_s)
    held = {tag: values[first:last] for tag, values in device.bytes.items()}
    end_s = min(end_s, device.end_s)
    return replace(device, times_s=times_s, end_s=end_s, phases=device.phases[first:last], bytes=held)


def _trim(device: Device) -> Device:
    """Without most of the start-up, which may well be longer than the steps."""
    begun = [time_s for time_s, phase in zip(device.times_s, device.phases, strict=True) if phase.isdigit()]
    return cut(device, max(0.0, begun[0] - 0.05 * (device.end_s - begun[0])), device.end_s + 1) if begun else device


def step_window(run: Path, step: int, origin_ns: int) -> tuple[float, float]:
    """Seconds of the memory log from a step's first barrier to its end, by the trace (both use one clock)."""
    own = [e for e in read_trace(run, step)[1] if e["tid"] == "train"]
    begins = [e for e in own if e["name"] == "barrier" and e["args"].get("before", "").startswith("1")] or own
    start, end = max(e["ts"] + e["dur"] for e in begins), max(e["ts"] + e["dur"] for e in own)
    return (1e3 * start - origin_ns) / 1e9, (1e3 * end - origin_ns) / 1e9


def phase_peaks(device: Device) -> dict[str, tuple[float, dict[str, int]]]:
    """Phase -> when its total was highest (seconds), and bytes by object at that moment."""
    total, peaks = device.total, {}
    for phase in sorted(set(filter(None, device.phases)), key=lambda p: (p.isdigit(), p != "start-up", p)):
        here = np.flatnonzero([p == phase for p in device.phases])
        top = int(here[np.argmax(total[here])])
        peaks[phase] = float(device.times_s[top]), {tag: int(values[top]) for tag, values in device.bytes.items()}
    return peaks


def peak_table(device: Device, plan: dict[str, dict[str, int]]) -> list[list[str]]:
    """Rows of objects; for each phase the highest sample and, where `plan` ({phase: {object: bytes}}) has the phase,
    the planner's bytes and by how much the sampled ones are more."""
    peaks = phase_peaks(device)
    name, unit = _unit(int(device.total.max()))
    rows = {tag: [tag] for tag in _order({tag for _, held in peaks.values() for tag, n in held.items() if n})}
    for tag in _order({tag for phase in peaks for tag in plan.get(phase, {})}):
        rows.setdefault(tag, [tag])
    head, total, at, capacity = [f"GPU {device.gpu}, {name}"], ["total"], ["at, s"], ["capacity"]
    for phase, (time_s, held) in peaks.items():
        head.append(_phase_name(phase))
        planned = plan.get(phase)
        for tag, row in rows.items():
            row += _against(held.get(tag, 0), planned and planned.get(tag, 0), unit)
        total += _against(sum(held.values()), planned and sum(planned.values()), unit)
        blank = [] if planned is None else ["", ""]
        head += [] if planned is None else ["plan", "more"]
        at += [f"{time_s:.2f}", *blank]
        capacity += ["n/a" if device.capacity_bytes is None else f"{device.capacity_bytes / unit:.2f}", *blank]
    return [head, *(rows[tag] for tag in _order(rows)), total, at, capacity]


def _phase_name(phase: str) -> str:
    return f"phase {phase}" if phase.isdigit() else phase


def _against(measured: int, planned: int | None, unit: int) -> list[str]:
    shown = f"{measured / unit:.2f}" if measured else "0"
    if planned is None:
        return [shown]
    return [shown, f"{planned / unit:.2f}" if planned else "0", f"{measured / planned - 1:+.1%}" if planned else "n/a"]


def counted_peaks(run: Path, step: int | None) -> str:
    """The phases' highest totals by the ledger, which misses nothing between samples, of one step or of all."""
    if not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").stat().st_size:
        return "no whole step in metrics.jsonl"
    records = [record for record in read_metrics(run) if step is None or record["step"] == step]
    found = {p: [r[key] for r in records if (key := f"memory/phase{p}_peak_bytes") in r] for p in "123"}
    shown = [f"phase {p} {max(values) / MIB:.2f} MiB" for p, values in found.items() if values]
    return "counted object by object, highest of all GPUs: " + (", ".join(shown) or "n/a")


def _order(tags: Iterable[str]) -> list[str]:
    return sorted(tags, key=lambda tag: ([*_OBJECTS].index(tag) if tag in _OBJECTS else len(_OBJECTS), tag))


def _unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", MIB)


def read_plan(run: Path) -> dict[str, dict[str, int]]:
    """Phase -> {object: bytes} by the planner; empty if the run has no plan.json."""
    path = run / "plan.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())["phase"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan ({type(error).__name__}: {error}): remove it, or run again") from error


def draw_memory(runs: dict[str, list[Device]], path: Path) -> None:
    """A column for each run: its GPUs stacked by object, and below the fullest of them by role. One scale for all."""
    rows = max(map(len, runs.values())) + 1
    size = (3.5 + 5.5 * len(runs) + 2 * (len(runs) == 1), 1 + 2.9 * rows)
    figure, panels = plt.subplots(rows, len(runs), figsize=size, squeeze=False, layout="constrained")
    devices = [device for found in runs.values() for device in found]
    top = max(int(device.total.max()) for device in devices)
    name, unit = _unit(top)
    shown = [d.capacity_bytes for d in devices if d.capacity_bytes and d.capacity_bytes <= 3 * top]
    limit = 1.12 * max(top, *shown, 0) / unit
    areas, lines = {}, {}
    for column, (run, found) in zip(panels.T, runs.items(), strict=True):
        for axes, device in zip(column, found, strict=False):
            areas |= _draw_objects(axes, device, unit)
            _draw_phases(axes, device)
            axes.set(title=f"{run}, GPU {device.gpu}", ylim=(0, limit), ylabel=name)
            _draw_capacity(axes, device, unit, limit)
        for axes in column[len(found) : -1]:
            axes.set_axis_off()
        fullest = max(found, key=lambda device: int(device.total.max()))
        lines |= _draw_roles(column[-1], fullest, unit)
        _draw_phases(column[-1], fullest)
        column[-1].set(title=f"GPU {fullest.gpu} by role", ylim=(0, limit), ylabel=name, xlabel="seconds")
    objects, roles = _order(areas)[::-1], list(lines)
    handles = [areas[tag] for tag in objects] + [lines[role] for role in roles]
    figure.legend(handles, objects + [f"role: {role}" for role in roles], loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_objects(axes, device: Device, unit: int) -> dict:
    edges, base, areas = np.append(device.times_s, device.end_s), np.zeros(len(device.times_s) + 1), {}
    for tag in _order(device.bytes):
        values = device.bytes[tag][[*range(len(device.times_s)), -1]] / unit  # the last value holds to the end
        if values.any():
            color = _OBJECTS.get(tag, "gold")
            areas[tag] = axes.fill_between(edges, base, base + values, step="post", color=color, linewidth=0)
            base = base + values
    axes.set_xlim(edges[0], edges[-1])
    return areas


def _draw_roles(axes, device: Device, unit: int) -> dict:
    edges, lines = np.append(device.times_s, device.end_s), {}
    known = {tag for tags in _ROLES.values() for tag in tags}
    colors = [*("tab:gray", "tab:blue", "tab:olive", "tab:red", "tab:purple"), "black"]
    roles = _ROLES | {"other": tuple(tag for tag in device.bytes if tag not in known)}
    for (role, tags), color in zip(roles.items(), colors, strict=True):
        held = [device.bytes[tag] for tag in tags if tag in device.bytes]
        if held and (values := sum(held)).any():
            values = np.append(values, values[-1]) / unit
            lines[role] = axes.step(edges, values, where="post", color=color, linewidth=1.3)[0]
    axes.set_xlim(edges[0], edges[-1])
    return lines


def _draw_phases(axes, device: Device) -> None:
    """Shade the phases, and name those that are wide enough."""
    edges = np.append(device.times_s, device.end_s)
    starts = [0, *(i for i in range(1, len(device.phases)) if device.phases[i] != device.phases[i - 1])]
    shades = {"1": "white", "2": "0.92", "3": "0.82"}
    for start, end in zip(starts, [*starts[1:], len(device.phases)], strict=True):
        phase, a, b = device.phases[start], edges[start], edges[end]
        axes.axvspan(a, b, color=shades.get(phase, "0.97"), linewidth=0, zorder=0)
        text = next((t for t in (_phase_name(phase), phase) if b - a > 0.011 * len(t) * (edges[-1] - edges[0])), "")
        at = axes.get_xaxis_transform()
        axes.text((a + b) / 2, 0.97, text, transform=at, ha="center", va="top", fontsize=8)


def _draw_capacity(axes, device: Device, unit: int, limit: float) -> None:
    if device.capacity_bytes and device.capacity_bytes / unit <= limit:
        axes.axhline(device.capacity_bytes / unit, color="black", linestyle="--", linewidth=1)
    elif device.capacity_bytes:
        name, unit = _unit(device.capacity_bytes)
        axes.set_title(f"{axes.get_title()}, capacity {device.capacity_bytes / unit:.0f} {name} (far above)")


# ---- growth ----------------------------------------------------------------------------------------------------------


def memory_series(records: list[Record], warm_up: float) -> tuple[list[int], dict[str, list[float]]]:
    """Steps, and MiB of host and device memory at each, without the share of them that warms up (at least one step).
    Raises ValueError if too few steps are left for a slope and its error."""
    if "workload" in records[-1]:
        raise ValueError("a run of bench.py compare has no trend: its steps alternate between schedules and workloads")
    if not 0 <= warm_up < 1:
        raise ValueError(f"--warm-up {warm_up}: expected a share from 0 to below 1")
    kept = records[max(1, int(warm_up * len(records))) :]
    names = [key for key in records[-1] if key.startswith("memory/")]
    if not names:
        raise ValueError("the run's metrics have no memory/host_bytes: was it written by an older train.py?")
    kept = [record for record in kept if all(name in record for name in names)]
    if len(kept) < 3:
        raise ValueError(f"{len(records)} steps are too few: a slope and its error need 3 after the warm-up")
    series = {name.removeprefix("memory/"): [record[name] / MIB for record in kept] for name in names}
    return [record["step"] for record in kept], series


def fit_slope(steps: list[int], values: list[float]) -> tuple[float, float, float, float]:
    """Least squares: slope, intercept, standard error of the slope, half the width of its 95 % interval.

    The error takes neighbouring steps as independent, which memory is not quite: the interval is a little narrow."""
    from scipy.special import stdtrit

    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    dx = x - x.mean()
    slope = float(dx @ (y - y.mean()) / (dx @ dx))
    intercept = float(y.mean() - slope * x.mean())
    residual = y - intercept - slope * x
    error = math.sqrt(float(residual @ residual) / (len(x) - 2) / float(dx @ dx))
    return slope, intercept, error, float(stdtrit(len(x) - 2, 0.975)) * error


def verdict(slope: float, half_width: float, tolerance_mib: float) -> str:
    return "grows" if slope - half_width > tolerance_mib else "flat"


def draw_growth(run: Path, steps: list[int], series: dict[str, list[float]], path: Path) -> None:
    figure, panels = plt.subplots(len(series), 1, figsize=(8, 1 + 1.9 * len(series)), sharex=True, squeeze=False)
    for axes, (name, values) in zip(panels[:, 0], series.items(), strict=True):
        slope, intercept, error, _ = fit_slope(steps, values)
        axes.plot(steps, values, ".", markersize=3, color="tab:blue")
        ends = np.array([steps[0], steps[-1]])
        axes.plot(ends, intercept + slope * ends, color="tab:red", linewidth=1.2)
        axes.set_title(f"{name}: {slope:+.4f} ± {error:.4f} MiB a step", fontsize=9)
        axes.set_ylabel("MiB")
        if np.ptp(values) < 1:  # a flat line is not to fill the panel with its noise
            middle = float(np.mean(values))
            axes.set_ylim(middle - 1, middle + 1)
        axes.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("step")
    figure.suptitle(run.resolve().name)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- helpers and commands --------------------------------------------------------------------------------------------


def _check_run(run: Path) -> None:
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory; expected one that train.py made, runs/<name> by default")


def _json_lines(path: Path) -> list[tuple[int, dict]]:
    """Line numbers and objects of a JSON-lines file. A torn last line is left out: the run may still be writing it."""
    lines, found = path.read_text().split("\n"), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            if number < len(lines):  # a newline follows it
                raise ValueError(f"{path} line {number} is not JSON ({error.msg}): remove or repair it") from error
    return found


def _file_of(run: Path, name: str) -> Path:
    _check_run(run)
    if not (run / name).is_file():
        raise ValueError(f"{run} has no {name}: expected a run directory that train.py made, is this its parent?")
    return run / name


def _at(records: list[Record], steps: list[int]) -> list[Record]:
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in steps]


def _median(records: list[Record], key: str, spec: str, scale: float = 1.0) -> str:
    values = [record[key] for record in records if key in record]
    return format(statistics.median(values) * scale, spec) if values else "n/a"


def _colors(names: Iterable[str]) -> dict[str, str]:
    colors, spare = dict(_COLORS), 0
    for name in names:
        if name not in colors:
            colors[name] = _SPARE[spare % len(_SPARE)]
            spare += 1
    return colors


def _covered(event: dict, others: list[dict]) -> float:
    """How many microseconds of `event` lie in the union of `others`."""
    total, start, end = 0.0, event["ts"], event["ts"] + event["dur"]
    for a, b in sorted((e["ts"], e["ts"] + e["dur"]) for e in others):
        a, b = max(a, start), min(b, end)
        if b > a:
            total, start = total + b - a, b
    return total


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def curves(args: Curves) -> None:
    if args.smooth < 1:
        raise ValueError(f"--smooth {args.smooth}: it must be 1 or more")
    if not args.runs:
        raise ValueError("no run given: name one or more run directories")
    groups = group_runs(args.runs)
    out = args.out or args.runs[0]
    out.mkdir(parents=True, exist_ok=True)
    rows = {name: summary(seeds) for name, seeds in groups.items()}
    print_table([["run", *next(iter(rows.values()))], *([name, *row.values()] for name, row in rows.items())])
    for name, seeds in groups.items():
        means = {phase: statistics.fmean(values[1:] or values) for phase, values in phase_seconds(seeds)[1].items()}
        shown = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in means.items() if abs(seconds) >= 0.005)
        print(f"\n{name}, mean seconds a step (from the second on, if there is one): {shown}")
    draw_reward(groups, out / "reward.png", args.smooth)
    draw_step_time(groups, out / "step_time.png")
    print(f"\nwrote {out / 'reward.png'} and {out / 'step_time.png'}")


def trace(args: Trace) -> None:
    step, events = read_trace(args.run, args.step)
    table = [["phase", "seconds", "while engine works", "while it only decodes"]]
    for (rank, name), (total, *inside) in overlap_table(events).items():
        shares = [f"{part:.3f} ({part / total:4.0%})" if total else "n/a" for part in inside]
        table.append([f"rank {rank} {name}", f"{total:.3f}", *shares])
    print(f"step {step}")
    print_table(table)
    path = args.out or args.run / f"trace-step{step}.png"
    draw_trace(step, events, path)
    print(f"\nwrote {path}")


def memory_picture(args: Memory) -> None:
    if not args.runs:
        raise ValueError("no run given: name one or more run directories")
    if args.step is not None and (len(args.runs) > 1 or args.window):
        raise ValueError(f"--step {args.step}: give one run, and no --window")
    chosen = {}
    for run in args.runs:
        devices = read_devices(run)
        if args.gpu is not None and not (devices := [d for d in devices if d.gpu == args.gpu]):
            raise ValueError(f"--gpu {args.gpu}: {run} has no memory log of this GPU")
        window = step_window(run, args.step, devices[0].origin_ns) if args.step is not None else args.window
        devices = [cut(device, *window) for device in devices] if window else devices
        devices.sort(key=lambda device: -int(device.total.max()))
        devices = sorted(devices[: 4 if len(args.runs) == 1 else 1], key=lambda device: device.gpu)
        name = run.resolve().name
        chosen[name if name not in chosen else str(run)] = devices if window else [_trim(d) for d in devices]
        for device in devices:
            print(f"\n{name}")
            print_table(peak_table(device, read_plan(run)))
        if not args.window:
            print(counted_peaks(run, args.step))
    path = args.out or args.runs[0] / "memory.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_memory(chosen, path)
    print(f"\nwrote {path}")


def growth(args: Growth) -> None:
    steps, series = memory_series(read_metrics(args.run), args.warm_up)
    table = [["memory", "mean MiB", "MiB a step", "standard error", "95 % interval", "verdict"]]
    for name, values in series.items():
        slope, _, error, half = fit_slope(steps, values)
        interval = f"{slope - half:+.5f} to {slope + half:+.5f}"
        row = [name, f"{statistics.fmean(values):.2f}", f"{slope:+.5f}", f"{error:.5f}", interval]
        table.append([*row, verdict(slope, half, args.tolerance_mib)])
    print(f"{len(steps)} steps, {steps[0]} to {steps[-1]}")
    print_table(table)
    path = args.out or args.run / "growth.png"
    draw_growth(args.run, steps, series, path)
    print(f"\nwrote {path}")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        import compare

        return compare.main(argv[1:])
    about = "Tables and figures from what runs leave behind. Also `bench.py compare`, which runs: see its own --help."
    command = tyro.cli(Curves | Trace | Memory | Growth, args=argv, description=about)
    try:
        {Curves: curves, Trace: trace, Memory: memory_picture, Growth: growth}[type(command)](command)
    except ValueError as error:
        sys.exit(f"bench.py: {error}")


if __name__ == "__main__":
    main()

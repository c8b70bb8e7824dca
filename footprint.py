"""Footprint: device memory over time by object, each phase's peak beside the planner's, and whether memory grows.

    memory-rank*.jsonl   ┐ read_devices()              ┌ memory.png   each GPU over time by object, and by role
    memory-engine*.jsonl ┴─► one Device for each GPU ──┤
    plan.json ─────────────────────────────────────────┴ the peak of each phase by object, beside the planner's
    metrics.jsonl ── memory_series() ─ fit_slope() ────┬ growth.png   memory over steps with its fitted slope
                                                       └ MiB a step, with standard error and verdict

Trainer and engine each log what they hold (memory.MemoryLog, engine.py), on the host's one clock. Both may see an
object; it is counted once, as its owner reports it.

Run:
    CPU and GPU alike:  python bench.py memory runs/tiny-s0 --step 7
                        python bench.py growth runs/tiny-s0
Left out on purpose: what PyTorch's allocator keeps without use, which object grows (the growth of a total is told).
To show another object, give it a colour in _OBJECTS and a role in _ROLES; who owns it is in _merge().
"""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
import numpy as np
import tyro

from records import MIB, WAIT, Record, check_run, json_lines, print_table, read_metrics, read_trace, require

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
    check_run(run)
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
    (_, header), *lines = json_lines(path) or [(1, {})]
    require(path, 1, header, ("capacity_bytes", "gpu", "process"))
    if not lines:
        raise ValueError(f"{path} has no sample yet: {WAIT}")
    for number, line in lines:
        require(path, number, line, ("bytes", "phase", "t_ns"))
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
    held_tags = {tag for _, held in peaks.values() for tag, n in held.items() if n}
    rows = {tag: [tag] for tag in _order(held_tags | {tag for phase in peaks for tag in plan.get(phase, {})})}
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
    return [head, *rows.values(), total, at, capacity]


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
    return areas


def _draw_roles(axes, device: Device, unit: int) -> dict:
    edges, lines = np.append(device.times_s, device.end_s), {}
    known = {tag for tags in _ROLES.values() for tag in tags}
    colors = "tab:gray", "tab:blue", "tab:olive", "tab:red", "tab:purple", "black"
    roles = _ROLES | {"other": tuple(tag for tag in device.bytes if tag not in known)}
    for (role, tags), color in zip(roles.items(), colors, strict=True):
        held = [device.bytes[tag] for tag in tags if tag in device.bytes]
        if held and (values := sum(held)).any():
            values = np.append(values, values[-1]) / unit
            lines[role] = axes.step(edges, values, where="post", color=color, linewidth=1.3)[0]
    return lines


def _draw_phases(axes, device: Device) -> None:
    """Shade the phases, and name those that are wide enough."""
    edges = np.append(device.times_s, device.end_s)
    axes.set_xlim(edges[0], edges[-1])
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


# ---- commands --------------------------------------------------------------------------------------------------------


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

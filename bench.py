"""Tables and figures from what runs leave behind: this file has the command line, curves and the timeline of a step.

    runs/a-s0/metrics.jsonl ┐                     ┌ reward.png       mean over seeds, band from lowest to highest seed
    runs/a-s1/metrics.jsonl ├─ bench.py curves ───┤ step_time.png    seconds per phase, stacked; they add up to the step
    runs/b-s0/metrics.jsonl ┘                     └ a table on the terminal
    runs/a-s0/trace.json    ─── bench.py trace ───┬ trace-step7.png  who did what when, one lane per rank and role
                                                  └ how much of each phase ran inside its own engine's decode

`memory` and `growth` are in footprint.py, what reads a run's files in records.py; `compare`, which needs a run of its
own, in compare.py. Runs whose names differ only in a trailing seed ("a-s0" and "a-s1", "a_seed3",
"a-seed=4") are seeds of one group.

Run:
    CPU and GPU alike:  python bench.py curves runs/tiny-s0 runs/tiny-s1 runs/tiny-s2
                        python bench.py trace runs/tiny-s0 --step 7
Left out on purpose: reading wandb, interactive plots (trace.json opens in ui.perfetto.dev).
To add a figure, add a dataclass with its fields, a function that computes the numbers and one that draws them, and name
the dataclass in `main`.
"""

import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
import tyro
from matplotlib.ticker import MaxNLocator

from footprint import Growth, Memory, growth, memory_picture
from records import Record, overlap_table, print_table, read_metrics, read_trace

_SEED = re.compile(r"[-_.]?s(eed)?[-_=]?\d+$")
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


# ---- curves: numbers -------------------------------------------------------------------------------------------------


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
    keys = dict.fromkeys(key for records in seeds for record in records for key in record if key.startswith("phase/"))
    names = [key.removeprefix("phase/") for key in keys if key != "phase/other"]  # in order of appearance
    rows = list(zip(*(_at(records, steps) for records in seeds), strict=True))
    phases = {name: [statistics.fmean(r.get(f"phase/{name}", 0.0) for r in row) for row in rows] for name in names}
    totals = [statistics.fmean(r["step_s"] for r in row) for row in rows]
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
    for name, seeds in groups.items():
        steps, mean, low, high = reward_curve(seeds, smooth)
        label = name if len(seeds) == 1 else f"{name} (mean of {len(seeds)} seeds, band lowest to highest)"
        (line,) = axes.plot(steps, mean, label=label, linewidth=2, marker="." if len(steps) < 40 else None)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    for chance in dict.fromkeys(seeds[0][-1].get("chance") for seeds in groups.values()):
        if chance is not None:
            axes.axhline(chance, color="black", linestyle="--", linewidth=1, label=f"chance {chance:.3g}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean reward" + (f", average of {smooth} steps" if smooth > 1 else ""))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", fontsize="medium")
    _save(figure, path)


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
    _save(figure, path)


# ---- trace -----------------------------------------------------------------------------------------------------------


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
    _save(figure, path)


# ---- helpers and commands --------------------------------------------------------------------------------------------


def _at(records: list[Record], steps: list[int]) -> list[Record]:
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in steps]


def _median(records: list[Record], key: str, spec: str, scale: float = 1.0) -> str:
    values = [record[key] for record in records if key in record]
    return format(statistics.median(values) * scale, spec) if values else "n/a"


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _colors(names: Iterable[str]) -> dict[str, str]:
    unknown = [name for name in dict.fromkeys(names) if name not in _COLORS]
    return _COLORS | dict(zip(unknown, cycle(_SPARE), strict=False))


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


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        import compare

        return compare.main(argv[1:])
    if argv[:1] == ["beside"]:
        import beside

        return beside.main(argv[1:])
    about = "Tables and figures from what runs leave behind. Also compare and beside, which run: see their own --help."
    command = tyro.cli(Curves | Trace | Memory | Growth, args=argv, description=about)
    try:
        {Curves: curves, Trace: trace, Memory: memory_picture, Growth: growth}[type(command)](command)
    except ValueError as error:
        sys.exit(f"bench.py: {error}")


if __name__ == "__main__":
    main()

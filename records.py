"""Records: what a run has left behind, read again, and the numbers that more than one picture needs.

    metrics.jsonl ─ read_metrics() ──► one dictionary a step
    trace.json ──── events_by_step() ► each step's events ─ overlap_table() ► what of them ran beside an engine's work
    *.jsonl ─────── json_lines() ────► lines with their numbers

A run may still be writing, or may have died doing so: a torn end is left out. Anything else that is damaged or missing
is a ValueError that names the file and what to do.

Run: python bench.py trace RUN (these functions print nothing by themselves)
Left out on purpose: memory logs (footprint.py, which alone needs them), checking that figures are plausible.
To read another file of a run, add a function here if several pictures need it, else beside the picture.
"""

import json
from pathlib import Path

_NEEDED = ("step", "reward_mean", "step_s")
MIB = 2**20
WAIT = "wait for the first, or see the logs beside it if the run has ended"

Record = dict  # one line of metrics.jsonl


def read_metrics(run: Path) -> list[Record]:
    """Records of a run in step order; a step that a resumed run repeated counts once, as it was last.

    Raises ValueError if the run or its metrics are missing, empty or damaged. A torn last line is left out: the run may
    still be writing it.
    """
    path = file_of(run, "metrics.jsonl")
    records: dict[int, Record] = {}
    for number, record in json_lines(path):
        require(path, number, record, _NEEDED)
        records[record["step"]] = record
    if not records:
        raise ValueError(f"{path} has no step yet: {WAIT}")
    return [records[step] for step in sorted(records)]


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
    path = file_of(run, "trace.json")
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
        raise ValueError(f"{path} has no step yet: {WAIT}")
    return {step: sorted(found, key=lambda e: (e["ts"], -e["dur"])) for step, found in by_step.items()}


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


def _covered(event: dict, others: list[dict]) -> float:
    """How many microseconds of `event` lie in the union of `others`."""
    total, start, end = 0.0, event["ts"], event["ts"] + event["dur"]
    for a, b in sorted((e["ts"], e["ts"] + e["dur"]) for e in others):
        a, b = max(a, start), min(b, end)
        if b > a:
            total, start = total + b - a, b
    return total


def check_run(run: Path) -> None:
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory; expected one that train.py made, runs/<name> by default")


def json_lines(path: Path) -> list[tuple[int, dict]]:
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


def file_of(run: Path, name: str) -> Path:
    check_run(run)
    if not (run / name).is_file():
        raise ValueError(f"{run} has no {name}: expected a run directory that train.py made, is this its parent?")
    return run / name


def require(path: Path, number: int, line: dict, keys: tuple[str, ...]) -> None:
    """Raises ValueError if a line of a file lacks one of the keys."""
    if missing := [key for key in keys if key not in line]:
        raise ValueError(f"{path} line {number} lacks {', '.join(missing)}: was it written by train.py?")


def print_table(rows: list[list[str]]) -> None:
    """In columns, the first of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))

"""Formats: what datasets look like on disk, read into one kind of row; and the built-in task, written in one of them.

    Video-R1 · CLEVRER · PerceptionTest · LLaVA-Video-178K · STAR · text ─► Row(media, question, options, solution, …)

Each format has a function in _READERS that turns one entry of the file into rows. Entries that are no samples by design
(captions, questions of a test split) become a Skip with its reason; entries without the format's fields are counted as
malformed and stop the start when there are too many. Nothing is decoded here: paths are only put together.

Run:  python formats.py FILE…    format, rows by source and type, what was skipped, the first row
Left out on purpose: downloading, parquet.
To add a format, add a function to _READERS and its distinguishing fields to _detect.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import av
import numpy as np
from rich.console import Console
from rich.progress import track

from decode import Clip
from reward import parse_choice, parse_number


@dataclass(slots=True)
class Row:
    """What every dataset format is read into."""

    source: str
    media: list[Clip]
    question: str
    options: list[str]  # with their letters: "A. cat"
    solution: str  # without tags
    problem_type: str


class Skip(str):
    """Instead of a row: why this entry is none (no fault of the file: a caption, a question of a test split)."""


def read_rows(
    path: str | Path, format: str = "auto", media_root: str = "", max_bad_fraction: float = 0.0
) -> tuple[list[Row], Counter[str]]:
    """All rows of one dataset file, and how many entries were skipped for which reason.

    ValueError when the file is no dataset, or when more than `max_bad_fraction` of its entries do not fit the format.
    """
    path = Path(path)
    entries = _entries(path)
    if format == "auto":
        format = _detect(entries[0], path)
    find = _Finder(Path(media_root) if media_root else path.parent)
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    faults = []
    for i, entry in enumerate(entries):
        try:
            for row in _READERS[format](entry, path.stem, find):
                if isinstance(row, Skip):
                    skipped[row] += 1
                else:
                    rows.append(row)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            faults.append(f"entry {i}: {reason}")
    if len(faults) > max_bad_fraction * len(entries):
        share = f"{len(faults)} of {len(entries)} entries do not fit the format {format}; the first is {faults[0]}"
        raise ValueError(f"--data.path {path}: {share}; name the right one with --data.format")
    if not rows:
        raise ValueError(f"--data.path {path}: no usable row; skipped: {dict(skipped)}")
    return rows, skipped + Counter({"malformed entry": len(faults)})


def _entries(path: Path) -> list:
    """Elements of a JSON list, (key, value) pairs of a JSON object, or the lines of a JSON-lines file."""
    if not path.is_file():
        raise ValueError(
            f"--data.path {path}: no such file; give a dataset's JSON file, or nothing for the built-in task"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = None if path.suffix == ".jsonl" else json.loads(text)
    except UnicodeDecodeError:
        raise ValueError(f"--data.path {path}: not text; give a JSON file") from None
    except json.JSONDecodeError as error:
        if "Extra data" not in error.msg:  # one object a line, whatever the file is called
            raise ValueError(f"--data.path {path}: not JSON ({error})") from None
        table = None
    if table is None:
        try:
            table = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"--data.path {path}: a line is not JSON ({error})") from None
    entries = list(table.items()) if isinstance(table, dict) else table
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"--data.path {path}: expected at least one entry, got {table!r:.40}")
    return entries


def _detect(entry: object, path: Path) -> str:
    if isinstance(entry, tuple) and isinstance(entry[1], dict) and "mc_question" in entry[1]:
        return "perception-test"
    fields = set(entry) if isinstance(entry, dict) else set()
    marks = {
        "video-r1": {"problem", "problem_type", "path"},
        "clevrer": {"video_filename", "questions"},
        "llava-video": {"conversations"},
        "star": {"video_id", "start", "end", "choices"},
    }
    for name, needed in marks.items():
        if needed <= fields:
            return name
    if fields & {"question", "problem"}:
        return "text"
    seen = f"fields {sorted(fields)}" if fields else f"{entry!r:.60}"
    raise ValueError(f"--data.path {path}: format not recognised from {seen}; name it with --data.format")


class _Finder:
    """Paths of media. If the first one asked for is not where its name says, all are looked up by file name anywhere
    below the root, whatever their extension (published archives unpack into various folders)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[str, str] | None = None

    def __call__(self, name: str) -> str:
        direct = os.path.normpath(self.root / name)
        if self.names is None:
            self.names = {}
            if not os.path.exists(direct):
                walk = ((folder, file) for folder, _, files in os.walk(self.root) for file in files)
                media = {".mp4", ".mkv", ".webm", ".avi", ".mov", ".gif", ".png", ".jpg", ".jpeg", ".webp"}
                self.names = {Path(f).stem: os.path.join(d, f) for d, f in walk if Path(f).suffix.lower() in media}
        return direct if not self.names or os.path.exists(direct) else self.names.get(Path(name).stem, direct)


def _video_r1(entry: dict, source: str, find: _Finder) -> Iterator[Row | Skip]:
    if entry["data_type"] not in ("image", "video"):
        raise ValueError(f"data_type {entry['data_type']!r} is neither image nor video")
    solution = re.sub(r"</?answer>", "", entry["solution"]).strip()
    media = [Clip(entry["data_type"], find(entry["path"]))]
    options = _lettered(entry.get("options") or [])
    yield Row(entry.get("data_source") or source, media, entry["problem"], options, solution, entry["problem_type"])


def _clevrer(entry: dict, source: str, find: _Finder) -> Iterator[Row | Skip]:
    media = [Clip("video", find(entry["video_filename"]))]
    for question in entry["questions"]:
        name, choices = f"clevrer-{question['question_type']}", question.get("choices")
        if "answer" not in (choices[0] if choices else question):
            yield Skip("question without answer")
        elif choices:
            options = _lettered([choice["choice"] for choice in choices])
            right = [
                option[0] for option, choice in zip(options, choices, strict=True) if choice["answer"] == "correct"
            ]
            yield Row(name, media, question["question"], options, ", ".join(right) or "none", "multiple select")
        else:
            answer = str(question["answer"])
            yield Row(name, media, question["question"], [], answer, "numerical" if answer.isdigit() else "exact")


def _perception_test(entry: tuple, source: str, find: _Finder) -> Iterator[Row | Skip]:
    video, about = entry
    for question in about["mc_question"]:
        if question.get("answer_id") is None:
            yield Skip("question without answer")
            continue
        options = _lettered(question["options"])
        right = options[question["answer_id"]][0]
        name = f"perception-test-{question['area']}" if "area" in question else "perception-test"
        yield Row(name, [Clip("video", find(f"{video}.mp4"))], question["question"], options, right, "multiple choice")


def _llava_video(entry: dict, source: str, find: _Finder) -> Iterator[Row | Skip]:
    """Each (human, gpt) pair is a row: multiple choice when the question lists options, else free-form."""
    media = [Clip("video", find(entry["video"]))]
    name, turns = entry.get("data_source") or source, entry["conversations"]
    for human, answer in zip(turns[::2], turns[1::2], strict=True):
        text, answer = re.sub(r"<(?:image|video)>", "", human["value"]).strip(), answer["value"].strip()
        question, options = _split_options(text)
        if options:
            letter = parse_choice(answer, options)
            found = Row(name, media, question, options, letter, "multiple choice") if letter else None
            yield found or Skip("answer that names none of the options")
        elif "_cap_" in source or ("?" not in text and len(answer.split()) > 40):
            yield Skip("caption")
        else:
            yield Row(name, media, text, [], answer, "free-form")


def _star(entry: dict, source: str, find: _Finder) -> Iterator[Row | Skip]:
    if "answer" not in entry:
        yield Skip("question without answer")
        return
    choices = [choice["choice"] for choice in sorted(entry["choices"], key=lambda c: c["choice_id"])]
    options = _lettered(choices)
    if choices.count(entry["answer"]) != 1:
        yield Skip("answer that names none of the options")
        return
    right = options[choices.index(entry["answer"])][0]
    media = [Clip("video", find(f"{entry['video_id']}.mp4"), float(entry["start"]), float(entry["end"]))]
    name = f"star-{entry['question_id'].split('_')[0].lower()}"
    yield Row(name, media, entry["question"], options, right, "multiple choice")


def _text(entry: dict, source: str, find: _Finder) -> Iterator[Row | Skip]:
    """Questions without media: GSM8K ("… #### 72"), MATH (solution with \\boxed{…}), multiple choice, plain answers."""
    question = entry["question"] if "question" in entry else entry["problem"]
    answer = next((entry[k] for k in ("answerKey", "answer", "solution") if entry.get(k) is not None), None)
    if answer is None:
        yield Skip("question without answer")
        return
    name = entry.get("data_source") or source
    if choices := entry.get("choices") or entry.get("options"):
        options, labels = _choices(choices)
        letter = _letter_of(answer, options, labels)
        yield (
            Row(name, [], question, options, letter, "multiple choice")
            if letter
            else Skip("answer that names none of the options")
        )
        return
    answer, kind = str(answer), "exact"
    if "####" in answer:
        answer, kind = answer.rsplit("####", 1)[1].strip(), "numerical"
    elif "\\boxed" in answer or "solution" in entry:
        answer, kind = _last_boxed(answer), "math"
    elif parse_number(answer):
        answer, kind = f"{answer} {entry.get('unit') or ''}".strip(), "numerical"
    elif len(answer.split()) > 5:
        kind = "free-form"
    yield Row(name, [], question, [], answer, entry.get("problem_type", kind))


_READERS = {
    "video-r1": _video_r1,
    "clevrer": _clevrer,
    "perception-test": _perception_test,
    "llava-video": _llava_video,
    "star": _star,
    "text": _text,
}


def _lettered(options: list[str]) -> list[str]:
    """ "A. cat" for each; options that already have their letters stay."""
    letters = [chr(65 + i) for i in range(len(options))]
    if all(re.match(rf"\(?{letter}[.:)]", option) for letter, option in zip(letters, options, strict=True)):
        return list(options)
    return [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]


def _split_options(text: str) -> tuple[str, list[str]]:
    """A question that lists its options line by line, and those; what follows them (how to answer) is dropped."""
    lines = text.split("\n")
    options = [line.strip() for line in lines if re.match(r"\s*\(?[A-Z][.:)]\s*\S", line)]
    if [option.lstrip("(")[0] for option in options] != [chr(65 + i) for i in range(len(options))] or len(options) < 2:
        return text, []
    first = next(i for i, line in enumerate(lines) if line.strip() == options[0])
    return "\n".join(lines[:first]).strip(), options


def _choices(choices: list | dict) -> tuple[list[str], list[str]]:
    """Options with letters, and the labels that the file itself uses for them."""
    if isinstance(choices, dict) and "text" in choices:  # ARC: {"text": […], "label": […]}
        texts, labels = choices["text"], choices["label"]
    elif isinstance(choices, dict):
        texts, labels = list(choices.values()), list(choices)
    else:
        texts, labels = choices, [chr(65 + i) for i in range(len(choices))]
    return _lettered([str(text) for text in texts]), [str(label) for label in labels]


def _letter_of(answer: str | int, options: list[str], labels: list[str]) -> str | None:
    """The right option's letter, from an index, a label or the option's text."""
    if isinstance(answer, int) and str(answer) not in labels:
        return options[answer][0] if answer < len(options) else None
    if str(answer) in labels:
        return options[labels.index(str(answer))].lstrip("(")[0]
    return parse_choice(str(answer), options)


def _last_boxed(text: str) -> str:
    """The content of the last \\boxed{…}, braces balanced; the text itself without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip()
    raise ValueError("unbalanced braces in \\boxed")


def progress(items: Sequence, label: str):
    """The items, with a progress line on a terminal's stderr."""
    console = Console(stderr=True)
    return track(items, label, console=console, disable=not console.is_terminal, transient=True)


# ---------------------------------------------------------------------------------------------- the built-in task

KINDS = ("color", "direction", "shape", "count")
COLORS = {"red": (235, 30, 30), "green": (30, 210, 30), "blue": (40, 60, 245), "yellow": (240, 225, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTIONS = {
    "color": ("What color is the shape?", tuple(COLORS)),
    "direction": ("Which way does it move?", tuple(DIRECTIONS)),
    "shape": ("What shape is it?", SHAPES),
    "count": ("How many shapes are there?", ("1", "2", "3", "4")),
}


def make_synthetic(root: str | Path, config) -> Path:
    """Write the built-in task below `root` unless it is there already; returns its JSON file.

    `config` is a data.DataConfig. The folder appears whole or not at all: written under a temporary name, then renamed.
    Answers are balanced within each kind.
    """
    names = [f.name for f in fields(config) if f.name.startswith("synthetic_")]
    settings = json.dumps({n: getattr(config, n) for n in ("seed", *names)} | {"version": 2})
    folder = Path(root) / f"shapes-{hashlib.sha256(settings.encode()).hexdigest()[:10]}"
    if (folder / "data.json").is_file():
        return folder / "data.json"
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    kinds = config.synthetic_kinds
    answers = [i // len(kinds) % 4 for i in range(config.synthetic_clips)]
    rows = []
    for i, answer in enumerate(progress(answers, f"writing the built-in task to {folder}")):
        kind = kinds[i % len(kinds)]
        _write_clip(temporary / f"{i:05}.mp4", kind, answer, np.random.default_rng([config.seed, i]), config)
        question, options = QUESTIONS[kind]
        rows.append(
            {
                "problem_id": i,
                "problem": question,
                "data_type": "video",
                "problem_type": "multiple choice",
                "options": [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)],
                "solution": f"<answer>{'ABCD'[answer]}</answer>",
                "path": f"./{i:05}.mp4",
                "data_source": f"shapes-{kind}",
            }
        )
    (temporary / "data.json").write_text(json.dumps(rows, indent=1))
    try:
        temporary.rename(folder)
    except OSError:  # another process was faster: its copy is the same
        if not (folder / "data.json").is_file():
            raise
        shutil.rmtree(temporary)
    return folder / "data.json"


def _write_clip(path: Path, kind: str, answer: int, rng: np.random.Generator, config) -> None:
    """Shapes of about a third of the width drift across a dark ground; whatever is not asked for is random."""
    side, frames = config.synthetic_side, config.synthetic_frames
    pick = {k: int(rng.integers(4)) for k in KINDS} | {"count": 0} | {kind: answer}
    color = list(COLORS.values())[pick["color"]]
    heading = np.array(list(DIRECTIONS.values())[pick["direction"]], dtype=float)
    count = pick["count"] + 1
    radius = side * (0.22 if count == 1 else 0.15)
    travel = (side / 2 - radius) * (1.0 if count == 1 else 0.25)
    corners = (
        np.array([(0, 0)]) if count == 1 else np.array([(-1, -1), (1, -1), (-1, 1), (1, 1)])[rng.permutation(4)[:count]]
    )
    centers = side / 2 + corners * side / 4 + (rng.uniform(-0.08, 0.08, 2) * side if count == 1 else 0)
    ground = rng.integers(0, 50)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=config.synthetic_fps)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        stream.options = {"crf": "8", "threads": "1", "bf": "0"}  # x264's output varies from run to run with B-frames
        for t in range(frames):
            image = np.full((side, side, 3), ground, dtype=np.uint8)
            shift = heading * travel * (2 * t / max(frames - 1, 1) - 1)
            for center in centers:
                image[_mask(SHAPES[pick["shape"]], center + shift, radius, side)] = color
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _mask(shape: str, center: np.ndarray, radius: float, side: int) -> np.ndarray:
    """[side, side] bool: the pixels that the shape covers."""
    y, x = np.mgrid[0:side, 0:side] + 0.5
    x, y = (x - center[0]) / radius, (y - center[1]) / radius
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.9
    if shape == "triangle":
        return (y <= 0.9) & (abs(x) <= (y + 1) / 1.9)
    return (np.minimum(abs(x), abs(y)) <= 0.35) & (np.maximum(abs(x), abs(y)) <= 1)


def main() -> None:
    for path in sys.argv[1:]:
        rows, skipped = read_rows(path, max_bad_fraction=1.0)
        kinds = Counter((row.source, row.problem_type) for row in rows)
        print(f"{path}: {len(rows)} rows; {dict(kinds)}; skipped {dict(skipped)}\n  {rows[0]}")


if __name__ == "__main__":
    main()

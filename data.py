"""Data: from a row of a dataset on disk to a decoded, tokenised prompt.

    rows (JSON) ──┐                       ┌ prompt_ids   one placeholder a clip   → engine
    .mp4 / .png ──┼→ decode → resize ──→ Sample input_ids  placeholders expanded  → trainer
    model's       │  (worker processes)   └ media        the very same uint8 frames for both
    chat template ┘

Sampling follows Qwen2.5-VL: `fps` frames a second, an even count, at most `max_frames`; sizes are multiples of 28 within
pixel budgets. Frames are resized here, once, to a size that transformers' and vLLM's processors leave as it is, so the
trainer and the engine see the same pixels and count the same visual tokens.

A sample that cannot be used (unreadable file, over-long prompt) raises BadSample: it is skipped, counted and logged, never
cut. `Loader` walks a shuffled order that is a pure function of the position, so a resumed run continues exactly, and it
decodes ahead in worker processes.

Run:  python data.py                            a sample of the built-in task, its prompt, rewards and decode rate
      python data.py --model DIR --data.path FILE

Left out on purpose: audio, subtitles, multi-turn conversations.
To add a dataset format, edit `read_rows`; a prompt, `instruction_for`; a reward, reward.py.

Shapes: T frames, H height, W width (pixels), P prompt tokens.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import av
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoProcessor

from decode import FACTOR, TEMPORAL, BadSample, Clip, Limits, WorkerDied, Workers, decode
from reward import reward

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
KINDS = ("color", "direction", "shape", "count")


@dataclass(frozen=True)
class DataConfig:
    path: str = ""
    """Dataset file, a JSON in Video-R1's row format; media paths are relative to its folder. Empty: the built-in task of
    moving coloured shapes."""
    fps: float = 4.0
    """Frames sampled per second of video (Qwen2.5-VL's own default is 2). The rate really reached, after the limits
    below, goes into the positions."""
    min_frames: int = 4
    """Fewest frames of a clip that has them; even."""
    max_frames: int = 16
    """Most frames of a clip; even. Longer clips are sampled more thinly over their whole length."""
    min_pixels: int = 4 * 28 * 28
    """Fewest pixels of a frame; smaller ones are enlarged. The model's processor may demand more."""
    max_pixels: int = 128 * 28 * 28
    """Most pixels of a frame: 28 * 28 pixels of two frames make one visual token. The model's processor may allow less."""
    total_pixels: int = 115_200 * 28 * 28
    """Most pixels of a whole clip, counting two frames as one (as visual tokens do). Takes effect below max_pixels a
    frame, down to 1.05 * min_pixels."""
    max_prompt_tokens: int = 4096
    """Longest prompt, visual tokens included. A longer one is dropped and counted, never truncated."""
    instruction: Literal["short", "video-r1"] = "short"
    """What the prompt asks for. short: only <answer>…</answer>. video-r1: reasoning in <think>…</think>, then the answer."""
    workers: int = 1
    """Decoder processes of each trainer rank; 0 decodes in the trainer itself."""
    decode_timeout_s: float = 60.0
    """Seconds after which a file that is still being decoded counts as bad (its worker is ended). Unused with 0 workers."""
    max_bad_fraction: float = 0.2
    """The run stops when more than this share of the samples met so far (at least 20) could not be used; 0 to 1."""
    seed: int = 0
    """Seed of the order of the samples and of the built-in task."""
    synthetic_clips: int = 512
    """Built-in task: number of clips, one question each."""
    synthetic_kinds: tuple[Literal["color", "direction", "shape", "count"], ...] = ("color",)
    """Built-in task: what is asked, in turn. Four fixed options each, so chance is 1/4."""
    synthetic_frames: int = 8
    """Built-in task: frames of a clip."""
    synthetic_side: int = 56
    """Built-in task: width and height of a clip in pixels, a multiple of 28."""
    synthetic_fps: int = 4
    """Built-in task: frames per second of a clip."""

    def validate(self) -> None:
        _require(self.fps > 0, "fps", self.fps, "give a rate above 0")
        for name in ("min_frames", "max_frames"):
            value = getattr(self, name)
            _require(value >= 2 and value % 2 == 0, name, value, "give an even number from 2")
        _require(self.min_frames <= self.max_frames, "min-frames", self.min_frames, f"max-frames is {self.max_frames}")
        _require(self.min_pixels <= self.max_pixels, "min-pixels", self.min_pixels, f"max-pixels is {self.max_pixels}")
        _require(self.max_pixels >= FACTOR**2, "max-pixels", self.max_pixels, "28 * 28 is the smallest frame")
        _require(0 <= self.max_bad_fraction <= 1, "max-bad-fraction", self.max_bad_fraction, "give a share from 0 to 1")
        _require(self.workers >= 0, "workers", self.workers, "0 decodes in the trainer itself")
        if not self.path:
            side, kinds = self.synthetic_side, self.synthetic_kinds
            _require(self.synthetic_clips >= 1, "synthetic-clips", self.synthetic_clips, "give at least 1")
            _require(self.synthetic_frames >= 1, "synthetic-frames", self.synthetic_frames, "give at least 1")
            _require(side >= FACTOR and side % FACTOR == 0, "synthetic-side", side, "give a multiple of 28")
            _require(
                bool(kinds) and set(kinds) <= set(KINDS), "synthetic-kinds", kinds, f"choose from {', '.join(KINDS)}"
            )


@dataclass
class Media:
    """One image (T = 1) or one sampled video (T even), at its final size."""

    kind: Literal["image", "video"]
    frames: np.ndarray  # [T, H, W, 3] uint8 RGB; H and W multiples of 28
    fps: float  # frames per second after sampling; 1.0 for an image

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width; the language model sees t * h * w / 4 tokens."""
        t, h, w = self.frames.shape[:3]
        return (t + TEMPORAL - 1) // TEMPORAL, h // 14, w // 14


@dataclass
class Sample:
    """One prompt, decoded: fully determined by dataset and index. Cheap to send to another rank: frames are uint8."""

    index: int  # row in the dataset
    source: str  # the row's data source, for metrics per source
    prompt_ids: list[int]  # one placeholder id for each medium: what the engine gets
    input_ids: torch.Tensor  # [P] int64, each placeholder repeated t*h*w/4 times: what the trainer reads
    media: list[Media]  # in order of appearance
    grid_thw: torch.Tensor  # [media, 3] int64
    second_per_grid: list[float]  # seconds of one temporal grid step, 2 / fps; 1.0 for an image
    question: str
    solution: str  # the answer, without its tags
    problem_type: str  # multiple choice | numerical | OCR | free-form | regression | exact
    options: list[str]

    @property
    def pixel_values(self) -> torch.Tensor | None:
        """[patches of all media, 1176] float32 on the CPU, bit-equal to transformers' processor. Computed at each access
        (it is eight times the frames' bytes for an image, four for a video): keep it while it is needed."""
        return torch.cat([_patchify(m.frames) for m in self.media]) if self.media else None


@dataclass
class Row:
    """What every dataset format is read into."""

    source: str
    media: list[Clip]
    question: str
    options: list[str]
    solution: str
    problem_type: str


class Dataset:
    """Rows of `config.path` (or of the built-in task, written under `root` when it is not there yet).

    len(dataset), dataset[i] -> Sample (raises BadSample), order(position) -> row. `model_dir` gives tokenizer, chat
    template and the processor's pixel bounds; no weights are read.
    """

    def __init__(self, config: DataConfig, model_dir: str | Path, root: str | Path) -> None:
        config.validate()
        self.config = config
        self.path = Path(config.path) if config.path else make_synthetic(root, config)
        self.rows = read_rows(self.path)
        self.processor = _load_processor(model_dir)
        self.tokenizer = self.processor.tokenizer
        self._placeholder = {"image": self.processor.image_token_id, "video": self.processor.video_token_id}
        self._limits = {kind: self._frame_limits(kind) for kind in ("image", "video")}
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.assemble(index, [decode(*job) for job in self.decode_jobs(index)])

    def order(self, position: int) -> int:
        """The row at a position of the endless shuffled walk; every epoch has its own permutation. Pure."""
        epoch, offset = divmod(position, len(self))
        if epoch not in self._orders:
            self._orders = {e: p for e, p in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.random.default_rng([self.config.seed, epoch]).permutation(len(self))
        return int(self._orders[epoch][offset])

    def decode_jobs(self, index: int) -> list[tuple]:
        """Arguments of `decode` for each medium of a row."""
        return [(clip, self._limits[clip.kind]) for clip in self.rows[index].media]

    def assemble(self, index: int, decoded: list[tuple[np.ndarray, float]]) -> Sample:
        """Tokenise the row's prompt around its decoded media. Visual tokens are counted before anything else is built."""
        row = self.rows[index]
        media = [Media(clip.kind, *found) for clip, found in zip(row.media, decoded, strict=True)]
        name = row.media[0].path if row.media else f"{self.path}, row {index}"
        prompt_ids = self._tokenize(row, name)
        counts = [math.prod(m.grid) // 4 for m in media]
        length = len(prompt_ids) - len(media) + sum(counts)
        if length > self.config.max_prompt_tokens:
            limit = f"over --data.max-prompt-tokens {self.config.max_prompt_tokens}"
            raise BadSample(name, f"prompt of {length} tokens ({sum(counts)} visual) is {limit}")
        return Sample(
            index=index,
            source=row.source,
            prompt_ids=prompt_ids,
            input_ids=torch.tensor(self._expand(prompt_ids, counts), dtype=torch.int64),
            media=media,
            grid_thw=torch.tensor([m.grid for m in media], dtype=torch.int64).reshape(-1, 3),
            second_per_grid=[TEMPORAL / m.fps if m.kind == "video" else 1.0 for m in media],
            question=row.question,
            solution=row.solution,
            problem_type=row.problem_type,
            options=row.options,
        )

    def prompt_text(self, row: Row) -> str:
        """The user turn through the model's chat template: media first, then question, options and instruction."""
        lines = [row.question, *row.options, instruction_for(row.problem_type, self.config.instruction)]
        content = [{"type": clip.kind} for clip in row.media] + [{"type": "text", "text": "\n".join(lines)}]
        messages = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _tokenize(self, row: Row, name: str) -> list[int]:
        text = "\n".join([row.question, *row.options])
        for token in self.tokenizer.all_special_tokens:
            if token in text:
                raise BadSample(name, f"the question holds the special token {token}")
        ids = self.tokenizer(self.prompt_text(row), add_special_tokens=False)["input_ids"]
        found = [kind for i in ids for kind, placeholder in self._placeholder.items() if i == placeholder]
        assert found == [clip.kind for clip in row.media], f"chat template gave placeholders {found} for {row.media}"
        return ids

    def _expand(self, prompt_ids: list[int], counts: list[int]) -> list[int]:
        remaining = iter(counts)
        placeholders = set(self._placeholder.values())
        return [i for token in prompt_ids for i in [token] * (next(remaining) if token in placeholders else 1)]

    def _frame_limits(self, kind: str) -> Limits:
        """The configured limits, narrowed to what the model's processor leaves unchanged (it would resize again)."""
        size = getattr(self.processor, f"{kind}_processor").size
        low, high = (
            max(self.config.min_pixels, size["shortest_edge"]),
            min(self.config.max_pixels, size["longest_edge"]),
        )
        if low > high:
            bounds = (
                f"the model's {kind} processor takes {size['shortest_edge']} to {size['longest_edge']} pixels a frame"
            )
            raise ValueError(f"--data.min-pixels {low} is above --data.max-pixels {high}: {bounds}; widen the range")
        c = self.config
        return Limits(c.fps, c.min_frames, c.max_frames, low, high, c.total_pixels)


class Loader:
    """Batches by position, decoded ahead in worker processes; skips and counts samples that cannot be used.

    One process:

        samples, position = loader.batch(position, n)

    Several ranks share the decoding: rank r of `world` decodes every world-th missing slot, everybody gathers all pieces,
    and all ranks then see the same good and bad slots and take the same samples:

        have = {}                                        # position -> Sample | BadSample
        while slots := loader.missing(have, position, n):
            have |= all_gather(loader.fetch(slots))      # collective: union of every rank's dict
        samples, position = loader.take(have, position, n)

    `take` starts the decoding of the next batch, so that it runs beside the step. `wait_s` is the time spent blocked in
    `fetch` so far; `seen` and `bad` count taken slots (the same on every rank, part of a checkpoint).
    """

    MIN_SEEN = 20  # slots before the bad share is judged

    def __init__(self, dataset: Dataset, run_dir: str | Path | None = None, rank: int = 0, world: int = 1) -> None:
        config = dataset.config
        self.dataset, self.rank, self.world = dataset, rank, world
        self.log = Path(run_dir) / "bad_samples.jsonl" if run_dir else None
        self.pool = Workers(config.workers, config.decode_timeout_s) if config.workers else None
        self.wait_s, self.seen, self.bad = 0.0, 0, 0
        self._ahead: dict[int, list[Future]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def batch(self, position: int, n: int) -> tuple[list[Sample], int]:
        """The next n usable samples from `position` and the position after them (one process)."""
        assert self.world == 1, "several ranks gather between fetch and take"
        have: dict[int, Sample | BadSample] = {}
        while slots := self.missing(have, position, n):
            have |= self.fetch(slots)
        return self.take(have, position, n)

    @staticmethod
    def missing(have: dict[int, Sample | BadSample], position: int, n: int) -> list[int]:
        """Slots to fetch next so that n good samples may follow `position`; empty when there are n. Pure."""
        good = sum(isinstance(s, Sample) for s in have.values())
        start = position + len(have)
        return list(range(start, start + n - good))

    def fetch(self, slots: list[int]) -> dict[int, Sample | BadSample]:
        """Decode this rank's share of the slots."""
        mine = slots[self.rank :: self.world]
        begin = time.monotonic()
        self._start(mine)
        result = {slot: self._finish(slot) for slot in mine}
        self.wait_s += time.monotonic() - begin
        return result

    def take(self, have: dict[int, Sample | BadSample], position: int, n: int) -> tuple[list[Sample], int]:
        """The first n good samples of `have`, the position after the last; ValueError when too many slots are bad."""
        samples: list[Sample] = []
        while len(samples) < n:
            slot = have[position]
            position, self.seen = position + 1, self.seen + 1
            if isinstance(slot, Sample):
                samples.append(slot)
                continue
            self.bad += 1
            self._judge(slot)
        self._ahead = {p: f for p, f in self._ahead.items() if p >= position}
        self._start(list(range(position, position + n))[self.rank :: self.world])
        return samples, position

    def close(self) -> None:
        """Ends the workers. No process is left."""
        self._ahead = {}
        if self.pool:
            self.pool.close()
            self.pool = None

    def _start(self, slots: list[int]) -> None:
        for slot in slots:
            if self.pool and slot not in self._ahead:
                jobs = self.dataset.decode_jobs(self.dataset.order(slot))
                self._ahead[slot] = [self.pool.submit(decode, *job) for job in jobs]

    def _finish(self, slot: int) -> Sample | BadSample:
        index = self.dataset.order(slot)
        try:
            if not self.pool:
                return self.dataset[index]
            futures = self._ahead.pop(slot)
            return self.dataset.assemble(index, [f.result() for f in futures])
        except WorkerDied as error:
            bad = BadSample(self.dataset.rows[index].media[0].path, f"decoder process {error}")
        except BadSample as error:
            bad = error
        if self.log:
            entry = {"position": slot, "row": index, "path": bad.path, "reason": bad.reason}
            with open(self.log, "a") as file:  # one short line a write: whole, whichever rank writes
                file.write(json.dumps(entry) + "\n")
        return bad

    def _judge(self, last: BadSample) -> None:
        limit = self.dataset.config.max_bad_fraction
        if self.seen >= self.MIN_SEEN and self.bad > limit * self.seen:
            where = f"all are listed in {self.log}" if self.log else "python data.py --check lists them"
            raise ValueError(
                f"{self.bad} of {self.seen} samples of {self.dataset.path} could not be used, over --data.max-bad-fraction "
                f"{limit}; the last was {last}; {where}"
            )


def instruction_for(problem_type: str, style: str) -> str:
    """The last line of the user turn: where the answer goes and what it is."""
    wanted = {
        "multiple choice": "the letter of the right option",
        "numerical": "a number",
        "regression": "a number",
        "OCR": "the text as it is written",
    }.get(problem_type, "the answer as text")
    if style == "short":
        return f"Give {wanted} in <answer></answer>."
    return (
        "Work through the question step by step between <think> and </think>, questioning and checking your own reasoning "
        f"as you go. Then give {wanted}, and nothing else, between <answer> and </answer>."
    )


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a Video-R1 JSON file: a list of {problem, data_type, problem_type, options, solution, path, data_source}."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"--data.path {path}: no such file; give a dataset's JSON file, or nothing for the built-in task"
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--data.path {path}: not JSON ({error})") from None
    if not isinstance(table, list) or not table:
        raise ValueError(
            f"--data.path {path}: expected a list of at least one row, got {type(table).__name__} {table!r:.20}"
        )
    return [_video_r1_row(row, i, path) for i, row in enumerate(table)]


def _video_r1_row(row: dict, i: int, path: Path) -> Row:
    try:
        kind, problem_type, options = row["data_type"], row["problem_type"], row.get("options") or []
        solution = row["solution"].replace("<answer>", "").replace("</answer>", "").strip()
        media = Clip(kind, str(path.parent / row["path"]))
        if kind not in ("image", "video"):
            raise ValueError(f"data_type {kind!r} is neither image nor video")
        return Row(row.get("data_source") or path.stem, [media], row["problem"], options, solution, problem_type)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"--data.path {path}: row {i}: {reason}; expected Video-R1's fields") from None


def _patchify(frames: np.ndarray) -> torch.Tensor:
    """[T, H, W, 3] uint8 -> [t*h*w, 1176] float32: normalised patches in the order in which 2 x 2 of them are merged."""
    x = torch.from_numpy(frames).permute(0, 3, 1, 2).float()  # (T, 3, H, W)
    mean, std = (torch.tensor(v).mul(255.0).view(3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
    x = x.sub_(mean).div_(std)
    if len(x) % TEMPORAL:
        x = torch.cat([x, x[-1:]])
    t, h, w = len(x) // TEMPORAL, x.shape[2] // 14, x.shape[3] // 14
    x = x.view(t, TEMPORAL, 3, h // 2, 2, 14, w // 2, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return x.reshape(t * h * w, 3 * TEMPORAL * 14 * 14)


# ---------------------------------------------------------------------------------------------- the built-in task

COLORS = {"red": (235, 30, 30), "green": (30, 210, 30), "blue": (40, 60, 245), "yellow": (240, 225, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTIONS = {
    "color": ("What color is the shape?", tuple(COLORS)),
    "direction": ("Which way does it move?", tuple(DIRECTIONS)),
    "shape": ("What shape is it?", SHAPES),
    "count": ("How many shapes are there?", ("1", "2", "3", "4")),
}


def make_synthetic(root: str | Path, config: DataConfig) -> Path:
    """Write the built-in task below `root` unless it is there already; returns its JSON file.

    Appears whole or not at all: written under a temporary name, then renamed. Answers are balanced within each kind.
    """
    names = [f.name for f in dataclasses.fields(config) if f.name.startswith("synthetic_")]
    settings = json.dumps({n: getattr(config, n) for n in ("seed", *names)} | {"version": 1})
    folder = Path(root) / f"shapes-{hashlib.sha256(settings.encode()).hexdigest()[:10]}"
    if (folder / "data.json").is_file():
        return folder / "data.json"
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    kinds = config.synthetic_kinds
    answers = [i // len(kinds) % 4 for i in range(config.synthetic_clips)]
    rows = []
    for i, answer in enumerate(_progress(answers, f"writing the built-in task to {folder}")):
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


def _write_clip(path: Path, kind: str, answer: int, rng: np.random.Generator, config: DataConfig) -> None:
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
        stream.options = {"crf": "8", "threads": "1"}
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


# ---------------------------------------------------------------------------------------------- small helpers


def _require(condition: bool, name: str, value: object, fix: str) -> None:
    if not condition:
        raise ValueError(f"--data.{name.replace('_', '-')} {value}: {fix}")


def _load_processor(model_dir: str | Path):
    """Tokenizer, chat template and pixel bounds of a model directory, checked against what this file assumes."""
    if not Path(model_dir).is_dir():
        raise ValueError(f"--model {model_dir}: no such directory")
    processor = AutoProcessor.from_pretrained(model_dir)
    for part in (getattr(processor, "image_processor", None), getattr(processor, "video_processor", None)):
        seen = part and (part.patch_size, part.merge_size, part.temporal_patch_size, *part.image_mean, *part.image_std)
        if seen != (14, 2, TEMPORAL, *CLIP_MEAN, *CLIP_STD):
            raise ValueError(f"--model {model_dir}: not a Qwen2.5-VL processor (patch, merge, mean and std are {seen})")
    return processor


def _progress(items: list, label: str):
    """The items, with a progress line on a terminal's stderr."""
    console = Console(stderr=True)
    return track(items, label, console=console, disable=not console.is_terminal, transient=True)


@dataclass(frozen=True)
class _Demo:
    """Show one decoded sample of a dataset, its prompt and rewards, and measure the decoder."""

    data: DataConfig = DataConfig()
    model: str = ""
    """Model directory (tokenizer, chat template and processor are used). Empty: the tiny built-in one."""
    root: str = "runs/data"
    """Folder for the built-in task."""
    index: int = 0
    """Row to show."""
    seconds: float = 5.0
    """How long to measure the decoder."""


def main() -> None:
    import tyro

    demo = tyro.cli(_Demo, description=_Demo.__doc__)
    model_dir = demo.model
    if not model_dir:
        from model import make_model_dir

        model_dir = make_model_dir("tiny", demo.root)
    dataset = Dataset(demo.data, model_dir, demo.root)
    sample = dataset[demo.index]
    print(f"{dataset.path}: {len(dataset)} rows")
    for medium in sample.media:
        print(f"row {demo.index}: {medium.kind} {medium.frames.shape} uint8, {medium.fps:.3g} frames/s")
    print(dataset.prompt_text(dataset.rows[demo.index]))
    visual = len(sample.input_ids) - len(sample.prompt_ids) + len(sample.media)
    print(f"{len(sample.input_ids)} prompt tokens, {visual} of them visual; grids {sample.grid_thw.tolist()}")
    for text in (f"<answer>{sample.solution}</answer>", "<answer>Z</answer>", sample.solution):
        print(f"reward of {text!r}: {reward(sample, text, True):g}")
    with Loader(dataset) as loader:
        loader.batch(0, 4)
        position, frames, begin = 4, 0, time.monotonic()
        while (spent := time.monotonic() - begin) < demo.seconds:
            samples, position = loader.batch(position, 8)
            frames += sum(len(m.frames) for s in samples for m in s.media)
        print(f"{frames / spent:.0f} frames/s and {position / spent:.0f} samples/s with {demo.data.workers} worker(s)")


if __name__ == "__main__":
    main()

"""Data: from a row of a dataset on disk to a decoded, tokenised prompt.

    JSON ─► formats.py ─► rows ─┐                             ┌ prompt_ids  one placeholder a medium ─► engine
    .mp4, .png ─► decode.py ────┼─► Sample (or BadSample) ────┼ media       the same uint8 frames ────► engine, trainer
    model's chat template ──────┘   skipped, counted, logged  └ input_ids   placeholders repeated ────► trainer

Sampling and sizes follow Qwen2.5-VL (see decode.py). Trainer and engine see the same pixels and count the same visual
tokens. A sample that cannot be used (unreadable file, over-long prompt) is skipped, counted and logged, never cut.
`Loader` walks an order that is a pure function of the position, so that a resumed run continues exactly, and decodes
ahead in worker processes.

Run:  python data.py                                    the built-in task: statistics page, a sample, the decode rate
      python data.py --path FILE --model DIR --answer '<answer>A</answer>'      the same of your dataset, and a reward
      python data.py --path FILE --model DIR --check    scan every sample with all cores, list those that cannot be used

Left out on purpose: audio, subtitles, conversations of several turns (each question is its own row).
To change the prompt, edit `instruction_for`; to add a dataset format, formats.py; a reward, reward.py.

Shapes: T frames, H height, W width (pixels), P prompt tokens.
"""

import collections
import functools
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from transformers import AutoProcessor

from decode import FACTOR, TEMPORAL, BadSample, Limits, WorkerDied, Workers, decode
from formats import KINDS, Row, make_synthetic, progress, read_rows
from reward import check_solution, reward

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class DataConfig:
    path: str = ""
    """Dataset file (JSON or JSON lines), or several separated by commas. Empty: the built-in task of moving coloured
    shapes."""
    format: Literal["auto", "video-r1", "clevrer", "perception-test", "llava-video", "star", "text"] = "auto"
    """How the files are laid out; auto recognises each from its fields. text: questions without media (MATH, GSM8K)."""
    media_root: str = ""
    """Folder of the images and videos, searched below when names in the file do not fit. Empty: the dataset file's."""
    weights: tuple[float, ...] = ()
    """With several files, the share of samples that each gives, in their order, scaled to 1. Empty: by their sizes."""
    eval_path: str = ""
    """Dataset file (or several) to evaluate on, same formats."""
    eval_fraction: float = 0.0
    """Without eval_path: share of the rows kept for evaluation, a clip's questions all on one side; 0 to 0.9."""
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
    """Most pixels of a frame; 28 * 28 of two frames make a visual token. The model's processor may allow less."""
    total_pixels: int = 115_200 * 28 * 28
    """Most pixels of a whole clip, counting two frames as one (as visual tokens do). Takes effect below max_pixels a
    frame, down to 1.05 * min_pixels."""
    max_prompt_tokens: int = 4096
    """Longest prompt, visual tokens included. A longer one is dropped and counted, never truncated."""
    instruction: Literal["short", "video-r1"] = "short"
    """What the prompt asks for. short: only <answer>…</answer>. video-r1: <think>…</think> with reasoning before it."""
    workers: int = 1
    """Decoder processes of each trainer rank; 0 decodes in the trainer itself."""
    decode_timeout_s: float = 60.0
    """Seconds after which a file still being decoded counts as bad (its worker is ended). Unused with 0 workers."""
    cache_gib: float = 0.0
    """Keep decoded clips on disk up to this size in GiB, shared by a host's ranks; least recently used go. 0: off."""
    max_bad_fraction: float = 0.2
    """The run stops when more than this share of the samples met so far (at least 20) could not be used, and does not
    start when more than this share of a file's entries is malformed; 0 to 1."""
    seed: int = 0
    """Seed of the order of the samples, of the split for evaluation and of the built-in task."""
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
        _require(self.decode_timeout_s > 0, "decode-timeout-s", self.decode_timeout_s, "give seconds above 0")
        _require(self.cache_gib >= 0, "cache-gib", self.cache_gib, "0 keeps nothing")
        _require(0 <= self.eval_fraction <= 0.9, "eval-fraction", self.eval_fraction, "give a share from 0 to 0.9")
        both = self.eval_path and self.eval_fraction
        _require(not both, "eval-fraction", self.eval_fraction, "leave it at 0 with --data.eval-path")
        files = len(_split_paths(self.path))
        fits = len(self.weights) in (0, files) and all(w > 0 for w in self.weights)
        _require(fits, "weights", self.weights, f"give one above 0 for each of the {files} files in --data.path")
        if not self.path:
            side, kinds = self.synthetic_side, self.synthetic_kinds
            _require(self.synthetic_clips >= 1, "synthetic-clips", self.synthetic_clips, "give at least 1")
            _require(self.synthetic_frames >= 1, "synthetic-frames", self.synthetic_frames, "give at least 1")
            _require(side >= FACTOR and side % FACTOR == 0, "synthetic-side", side, "give a multiple of 28")
            known = bool(kinds) and set(kinds) <= set(KINDS)
            _require(known, "synthetic-kinds", kinds, f"choose from {', '.join(KINDS)}")


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
    problem_type: str  # a key of reward.py's table
    options: list[str]

    @property
    def visual_tokens(self) -> int:
        """Tokens of `input_ids` that stand for media; the vision tower sees four patches for each."""
        return int(self.grid_thw.prod(-1).sum()) // 4


class Dataset:
    """Rows of `config.path` (or of the built-in task, written under `root` when it is not there yet).

    len(dataset), dataset[i] -> Sample (raises BadSample), order(position) -> row. split "eval" holds what config keeps
    for evaluation. `model_dir` gives tokenizer, chat template and the processor's pixel bounds; no weights are read.
    """

    def __init__(
        self, config: DataConfig, model_dir: str | Path, root: str | Path, split: Literal["train", "eval"] = "train"
    ) -> None:
        config.validate()
        self.config = config
        separate = split == "eval" and config.eval_path
        if split == "eval" and not separate and not config.eval_fraction:
            raise ValueError("--data.eval-fraction 0: nothing to evaluate on; set it, or --data.eval-path")
        self.paths = _split_paths(config.eval_path if separate else config.path) or [make_synthetic(root, config)]
        self.rows: list[Row] = []
        self.skipped: Counter[str] = Counter()  # rows of the files that are no samples, by reason
        self._members: list[list[int]] = []  # rows of each file
        for path in self.paths:
            rows, skipped = read_rows(path, config.format, config.media_root, config.max_bad_fraction)
            if config.eval_fraction:
                rows = [row for row in rows if _kept_for_eval(row, config) == (split == "eval")]
            self._members.append(list(range(len(self.rows), len(self.rows) + len(rows))))
            self.rows += rows
            self.skipped += skipped
        if not all(self._members):
            raise ValueError(
                f"--data.eval-fraction {config.eval_fraction}: leaves a file without {split} rows; change it"
            )
        self.name = ", ".join(map(str, self.paths))
        self.processor = _load_processor(model_dir)
        self.tokenizer = self.processor.tokenizer
        self._placeholder = {"image": self.processor.image_token_id, "video": self.processor.video_token_id}
        self._limits = {kind: self._frame_limits(kind) for kind in ("image", "video")}
        self._cache = (str(Path(root) / "clips"), int(config.cache_gib * 2**30)) if config.cache_gib else ()
        self._weights = config.weights if split == "train" else ()
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.assemble(index, [decode(*job) for job in self.decode_jobs(index)])

    def order(self, position: int) -> int:
        """The row at a position of the endless shuffled walk. Pure.

        An epoch has as many positions as there are rows. Each file fills its share of them from its own endless
        sequence of permutations, so without weights every row comes once an epoch.
        """
        epoch, offset = divmod(position, len(self))
        if epoch not in self._orders:
            self._orders = {e: p for e, p in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = self._epoch(epoch)
        return int(self._orders[epoch][offset])

    def _epoch(self, epoch: int) -> np.ndarray:
        sizes = [len(members) for members in self._members]
        shares = np.array(self._weights or sizes, dtype=float)
        ends = np.round(np.cumsum(shares) / shares.sum() * len(self)).astype(int)
        drawn = []
        for file, (members, quota) in enumerate(zip(self._members, np.diff(ends, prepend=0), strict=True)):
            draws = np.arange(epoch * quota, (epoch + 1) * quota)  # of this file's sequence
            for lap in np.unique(draws // len(members)):
                shuffled = np.random.default_rng([self.config.seed, file, lap]).permutation(members)
                drawn.append(shuffled[draws[draws // len(members) == lap] % len(members)])
        return np.random.default_rng([self.config.seed, epoch]).permutation(np.concatenate(drawn))

    def decode_jobs(self, index: int) -> list[tuple]:
        """Arguments of `decode` for each medium of a row."""
        return [(clip, self._limits[clip.kind], *self._cache) for clip in self.rows[index].media]

    def assemble(self, index: int, decoded: list[tuple[np.ndarray, float]]) -> Sample:
        """Tokenise the row's prompt around its decoded media. Visual tokens are counted before anything is built."""
        row = self.rows[index]
        media = [Media(clip.kind, *found) for clip, found in zip(row.media, decoded, strict=True)]
        name = row.media[0].path if row.media else f"{self.name}, row {index}"
        try:
            check_solution(row)
        except ValueError as error:
            raise BadSample(name, str(error)) from None
        prompt_ids = self._tokenize(row, name)
        counts = [math.prod(m.grid) // 4 for m in media]
        length = len(prompt_ids) - len(media) + sum(counts)
        if length > self.config.max_prompt_tokens:
            limit = f"over --data.max-prompt-tokens {self.config.max_prompt_tokens}"
            raise BadSample(name, f"prompt of {length} tokens ({sum(counts)} visual) {limit}")
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
        low, high = size["shortest_edge"], size["longest_edge"]
        bounds = f"the model's {kind} processor takes {low} to {high} pixels a frame"
        low, high = max(self.config.min_pixels, low), min(self.config.max_pixels, high)
        if low > high:
            raise ValueError(f"--data.min-pixels {low} is above --data.max-pixels {high}: {bounds}; widen the range")
        c = self.config
        return Limits(c.fps, c.min_frames, c.max_frames, low, high, c.total_pixels)


class Loader:
    """Batches by position, decoded ahead in worker processes; skips and counts samples that cannot be used.

    One process:

        samples, position = loader.batch(position, n)

    Several ranks share the decoding: rank r of `world` decodes every world-th missing slot, everybody gathers all
    pieces, and all ranks then see the same good and bad slots and take the same samples:

        have = {}                                        # position -> Sample | BadSample
        while slots := loader.missing(have, position, n):
            have |= all_gather(loader.fetch(slots))      # collective: union of every rank's dict
        samples, position = loader.take(have, position, n)

    `take` starts the decoding of the next batch, so that it runs beside the step. `wait_s` is the time spent blocked in
    `fetch` so far; `seen` and `bad` count taken slots (the same on every rank, part of a checkpoint), `reasons` why.
    """

    MIN_SEEN = 20  # slots before the bad share is judged

    def __init__(self, dataset: Dataset, run_dir: str | Path | None = None, rank: int = 0, world: int = 1) -> None:
        config = dataset.config
        self.dataset, self.rank, self.world = dataset, rank, world
        self.log = Path(run_dir) / "bad_samples.jsonl" if run_dir else None
        self.pool = Workers(config.workers, config.decode_timeout_s) if config.workers else None
        self.wait_s, self.seen, self.bad = 0.0, 0, 0
        self.reasons: Counter[str] = Counter()
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

    def decoded(self, slots: list[int]) -> bool:
        """Whether fetch() would find this rank's share of the slots decoded, and not wait."""
        jobs = [self._ahead.get(slot) for slot in slots[self.rank :: self.world]]
        return all(futures is not None and all(future.done() for future in futures) for futures in jobs)

    @staticmethod
    def usable(have: dict[int, Sample | BadSample]) -> list[Sample]:
        """The good samples of `have`, with which take() will begin. Pure."""
        return [have[slot] for slot in sorted(have) if isinstance(have[slot], Sample)]

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
            self.reasons[_kind_of(slot.reason)] += 1
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
                f"{self.bad} of {self.seen} samples of {self.dataset.name} could not be used, over "
                f"--data.max-bad-fraction {limit}; the last was {last}; {where}"
            )


def instruction_for(problem_type: str, style: str) -> str:
    """The last line of the user turn: where the answer goes and what it is."""
    wanted = {
        "multiple choice": "the letter of the right option",
        "multiple select": "the letters of all right options with commas between, or none",
        "numerical": "a number",
        "regression": "a number",
        "OCR": "the text as it is written",
        "exact": "the answer in a word or two",
        "math": "the final result",
    }.get(problem_type, "the answer as text")
    if style == "short":
        return f"Give {wanted} in <answer></answer>."
    return (
        "Work through the question step by step between <think> and </think>, questioning and checking your own "
        f"reasoning as you go. Then give {wanted}, and nothing else, between <answer> and </answer>."
    )


def _kept_for_eval(row: Row, config: DataConfig) -> bool:
    """By the clip (or the question), so that nothing seen in training is asked in evaluation."""
    key = os.path.basename(row.media[0].path) if row.media else row.question
    digest = hashlib.sha256(f"{config.seed} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.eval_fraction * 2**64


def patchify(frames: torch.Tensor) -> torch.Tensor:
    """[T, H, W, 3] uint8 -> [t*h*w, 1176] float32 on the frames' device: normalised patches, those merged later (2 x 2)
    one after another. On a CPU bit-equal to transformers' processor."""
    mean, std = _normalisation(frames.device)
    x = frames.permute(0, 3, 1, 2).float().sub_(mean).div_(std)  # [T, 3, H, W]
    if len(x) % TEMPORAL:
        x = torch.cat([x, x[-1:]])
    t, h, w = len(x) // TEMPORAL, x.shape[2] // 14, x.shape[3] // 14
    x = x.view(t, TEMPORAL, 3, h // 2, 2, 14, w // 2, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return x.reshape(t * h * w, 3 * TEMPORAL * 14 * 14)


@functools.lru_cache
def _normalisation(device: torch.device) -> list[torch.Tensor]:
    return [torch.tensor(v).mul(255.0).view(3, 1, 1).to(device) for v in (CLIP_MEAN, CLIP_STD)]


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


def _split_paths(path: str) -> list[Path]:
    return [Path(p.strip()) for p in path.split(",") if p.strip()]


def _kind_of(reason: str) -> str:
    """A reason without its numbers, for counting."""
    return re.sub(r"\d[\d.,x]*", "#", reason)


# ---------------------------------------------------------------------------------------------- the statistics page


@dataclass(frozen=True)
class _Page:
    """Statistics of a dataset, one decoded sample with its prompt and reward, and the decode rate."""

    data: DataConfig = DataConfig()
    model: str = ""
    """Model directory (tokenizer, chat template and processor are used). Empty: the tiny built-in one."""
    root: str = "runs/data"
    """Folder for the built-in task and the clip cache."""
    index: int = 0
    """Row to show."""
    answer: str = ""
    """A response to that row, whose reward is printed. Empty: the right answer."""
    samples: int = 200
    """How many samples to decode for the statistics."""
    response_tokens: int = 256
    """Length of a response in the totals and prompt fractions: take your run's own mean."""
    out: str = "runs/data-page"
    """Folder for tokens.png (the two distributions) and frames.png (the shown sample)."""
    check: bool = False
    """Instead: decode every sample with all cores and list those that cannot be used."""


def check(dataset: Dataset, workers: int) -> list[BadSample]:
    """Try every row once; the unusable ones."""
    bad: list[BadSample] = []
    pool = Workers(workers, dataset.config.decode_timeout_s)
    try:
        ahead: collections.deque[tuple[int, list[Future]]] = collections.deque()
        for index in progress(range(len(dataset)), "checking"):
            ahead.append((index, [pool.submit(decode, *job) for job in dataset.decode_jobs(index)]))
            if len(ahead) > 4 * workers:
                bad += _try(dataset, *ahead.popleft())
        while ahead:
            bad += _try(dataset, *ahead.popleft())
    finally:
        pool.close()
    return bad


def _try(dataset: Dataset, index: int, futures: list[Future]) -> list[BadSample]:
    try:
        dataset.assemble(index, [future.result() for future in futures])
    except BadSample as bad:
        return [bad]
    except WorkerDied as error:
        return [BadSample(dataset.rows[index].media[0].path, f"decoder process {error}")]
    return []


def _print_table(dataset: Dataset, samples: list[Sample]) -> None:
    from rich.table import Table

    table = Table("source", "rows", "kind", "median tokens", "95 %", "visual", "frames", "fps", title=dataset.name)
    rows = Counter((row.source, row.problem_type) for row in dataset.rows)
    for (source, kind), count in rows.most_common(30):
        mine = [s for s in samples if (s.source, s.problem_type) == (source, kind)]
        cells = ["n/a"] * 5
        if mine:
            lengths = [len(s.input_ids) for s in mine]
            visual = [s.visual_tokens for s in mine]
            frames = [sum(len(m.frames) for m in s.media) for s in mine]
            rates = [m.fps for s in mine for m in s.media if m.kind == "video"]
            cells = [f"{np.median(lengths):.0f}", f"{np.quantile(lengths, 0.95):.0f}", f"{np.median(visual):.0f}"]
            cells += [f"{np.median(frames):.0f}", f"{np.median(rates):.3g}" if rates else "n/a"]
        table.add_row(source, str(count), kind, *cells)
    Console().print(table)


def _draw_tokens(samples: list[Sample], response_tokens: int, path: Path) -> None:
    """The paper's Figure 2: distribution of tokens a sample (left) and of the prompt's share of them (right)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_source: dict[str, list[int]] = collections.defaultdict(list)
    for sample in samples:
        by_source[sample.source].append(len(sample.input_ids))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for source, lengths in sorted(by_source.items(), key=lambda item: -len(item[1]))[:10]:
        prompt = np.sort(lengths)[[0, *range(len(lengths))]]  # the shortest twice: the curve starts at 0
        share = np.arange(len(prompt)) / len(lengths)
        left.step(prompt + response_tokens, share, where="post", label=f"{source} ({len(lengths)})")
        right.step(prompt / (prompt + response_tokens), share, where="post")
    lengths = [len(s.input_ids) + response_tokens for s in samples]
    left.set(xscale="log" if max(lengths) > 8 * min(lengths) else "linear", ylabel="share of samples")
    left.set(xlabel=f"tokens a sample, its response taken as {response_tokens}", ylim=(0, 1.02))
    right.set(xlabel="prompt fraction", xlim=(0, 1), ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_frames(sample: Sample, path: Path) -> None:
    """All frames of the first medium, in time from left to right and down, on a sheet about as wide as high."""
    frames = list(sample.media[0].frames)
    height, width = frames[0].shape[:2]
    columns = math.ceil(math.sqrt(len(frames) * height / width))
    frames += [np.full_like(frames[0], 255)] * (-len(frames) % columns)
    lines = [np.concatenate(frames[i : i + columns], axis=1) for i in range(0, len(frames), columns)]
    Image.fromarray(np.concatenate(lines)).save(path)


def _show(dataset: Dataset, page: _Page, out: Path) -> None:
    sample = dataset[page.index]
    print(f"\nrow {page.index} of {sample.source}, {sample.problem_type}:")
    for medium, clip in zip(sample.media, dataset.rows[page.index].media, strict=True):
        print(f"{clip.path}: {medium.kind} {medium.frames.shape} uint8, {medium.fps:.3g} frames/s")
    print(dataset.prompt_text(dataset.rows[page.index]))
    tokens = f"{len(sample.input_ids)} prompt tokens, {sample.visual_tokens} of them visual"
    print(f"{tokens}; grids {sample.grid_thw.tolist()}")
    examples = [f"<answer>{sample.solution}</answer>", "<answer>?</answer>", sample.solution]
    for text in [page.answer] if page.answer else examples:
        print(f"reward of {text!r}: {reward(sample, text, True):g}")
    if sample.media:
        _draw_frames(sample, out / "frames.png")
        print(f"frames: {out / 'frames.png'}")


def _print_check(dataset: Dataset) -> int:
    bad = check(dataset, os.cpu_count() or 1)
    for sample in bad:
        print(sample)
    for reason, count in Counter(_kind_of(b.reason) for b in bad).most_common():
        print(f"{count:6} × {reason}")
    print(f"{len(bad)} of {len(dataset)} samples cannot be used")
    return 1 if bad else 0


def _print_page(dataset: Dataset, page: _Page) -> int:
    out = Path(page.out)
    out.mkdir(parents=True, exist_ok=True)
    with Loader(dataset) as loader:
        begin = time.monotonic()
        found = loader.fetch(list(range(min(page.samples, len(dataset))))).values()
        spent = time.monotonic() - begin
    samples = [s for s in found if isinstance(s, Sample)]
    _print_table(dataset, samples)
    frames = sum(len(m.frames) for s in samples for m in s.media)
    rate = f"{frames / spent:.0f} frames/s, {len(samples) / spent:.0f} samples/s"
    print(
        f"decoded {len(samples)} samples ({len(found) - len(samples)} bad): {rate} with {page.data.workers} worker(s)"
    )
    if samples:
        _draw_tokens(samples, page.response_tokens, out / "tokens.png")
        print(f"token distributions: {out / 'tokens.png'}")
    _show(dataset, page, out)
    return 0


def main() -> int:
    import tyro

    page = tyro.cli(Annotated[_Page, tyro.conf.OmitArgPrefixes], description=_Page.__doc__)
    model_dir = page.model
    if not model_dir:
        from configs import make_model_dir

        model_dir = make_model_dir("tiny", page.root)
    try:
        dataset = Dataset(page.data, model_dir, page.root)
        if dataset.skipped:
            print("skipped: " + ", ".join(f"{n} × {reason}" for reason, n in dataset.skipped.most_common()))
        return _print_check(dataset) if page.check else _print_page(dataset, page)
    except (ValueError, BadSample) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

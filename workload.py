"""Workloads: what both schedules of a comparison compute, the same in every step and chosen by token counts alone.

    "470/125" ─┬ 470 prompt tokens ───► clip_size(): frames and side of the clip whose visual tokens fill them up
               └ 125 response tokens ─► draw_lengths(): lognormal about 125, one length for each response of a step

The clips are those of the built-in task (data.make_synthetic), decoded once; a response ends at its given length,
whatever the policy would have said.

Run: torchrun --nproc-per-node 2 bench.py compare --workloads 120/12 --prompts 8
Left out on purpose: several sizes of clips in one step, sampled response lengths.
To give responses another distribution, edit draw_lengths(); to fill a prompt with something else, size_clips().
"""

import math
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """What both schedules compute in every step. N responses a prompt."""

    name: str  # as asked for: prompt tokens / median response tokens
    prompt_tokens: int  # at most so many
    lengths: list[tuple[int, ...]]  # [prompts][N] response tokens
    frames: int = 0
    side: int = 0  # pixels


def parse_workload(text: str) -> tuple[int, int]:
    """ "470/125" -> prompt tokens, median response tokens."""
    if not (match := re.fullmatch(r"(\d+)/(\d+)", text)) or not (int(match[1]) and int(match[2])):
        raise ValueError(f"--workloads {text}: expected prompt tokens / median response tokens, like 470/125")
    return int(match[1]), int(match[2])


def draw_lengths(median: int, prompts: int, n: int, sigma: float, most: int, seed: int) -> list[tuple[int, ...]]:
    """[prompts][n] response lengths: lognormal about the median, from 1 to `most` tokens."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, (prompts, n))
    return [tuple(int(length) for length in row) for row in np.clip(np.rint(drawn), 1, most)]


def clip_size(visual_tokens: int, least_pixels: int, most_pixels: int) -> tuple[int, int]:
    """Frames and side of the square clip with the most visual tokens up to `visual_tokens`, pixels a frame within the
    processor's bounds; of equal ones that nearest to 16 frames. Two frames of 28 * 28 pixels make a token."""
    sides = [k for k in range(1, 100) if least_pixels <= (28 * k) ** 2 <= most_pixels]
    sizes = [(f // 2 * k * k, -abs(f - 16), f, 28 * k) for f in range(2, 34, 2) for k in sides]
    if not (fitting := [size for size in sizes if size[0] <= visual_tokens]):
        raise ValueError(f"{visual_tokens} visual tokens are too few: the smallest clip has {min(sizes)[0]}")
    *_, frames, side = max(fitting)
    return frames, side


def size_clips(config, workloads: list[Workload], model_dir: Path, root: Path) -> list[Workload]:
    """Choose each workload's clip so that text and visual tokens come near its prompt tokens and never above."""
    import data

    dataset = data.Dataset(replace(config, max_prompt_tokens=1 << 30), model_dir, root)
    text = max(len(dataset[i].prompt_ids) - 1 for i in range(len(dataset)))
    bounds = dataset.processor.video_processor.size
    sized = []
    for w in workloads:
        try:
            frames, side = clip_size(w.prompt_tokens - text, bounds["shortest_edge"], bounds["longest_edge"])
        except ValueError as error:
            raise ValueError(f"--workloads {w.name}: {text} of its prompt's tokens are text, and {error}") from None
        sized.append(replace(w, frames=frames, side=side))
    return sized


def clip_config(config, frames: int, side: int, clips: int):
    """data.DataConfig for the built-in task with clips of this size, taken as they are."""
    pixels, rate = side * side, config.synthetic_fps
    limits = dict(min_frames=min(config.min_frames, frames), max_frames=frames, fps=float(rate))
    limits |= dict(min_pixels=min(config.min_pixels, pixels), max_pixels=pixels)
    return replace(config, synthetic_frames=frames, synthetic_side=side, synthetic_clips=clips, **limits)


class Prepared:
    """A loader (data.Loader) of one batch, decoded beforehand, whatever the position."""

    wait_s, seen, bad = 0.0, 0, 0

    def __init__(self, samples: list):
        self._samples = samples

    def missing(self, have: dict, position: int, n: int) -> list[int]:
        return []

    def decoded(self, slots: list[int]) -> bool:
        return True

    def usable(self, have: dict) -> list:
        return self._samples

    def take(self, have: dict, position: int, n: int) -> tuple[list, int]:
        return self._samples, position

    def close(self) -> None:
        pass


def decode_samples(trainer, config) -> list:
    """A step's prompts of one workload, decoded by all ranks. Collective."""
    import data

    dataset = data.Dataset(config, trainer.model_dir, trainer.run_dir.parent / "data")
    with data.Loader(dataset, trainer.run_dir, trainer.ranks.rank, trainer.ranks.world) as loader:
        return trainer.samples(loader, 0, trainer.config.prompts)[0]


def describe(workload: Workload, samples: list) -> str:
    """A line on what is computed, with the exact token counts."""
    tokens = sorted({len(sample.input_ids) for sample in samples})
    lengths = sorted(length for row in workload.lengths for length in row)
    return (
        f"workload {workload.name}: {len(samples)} prompts of {' or '.join(map(str, tokens))} tokens, "
        f"{samples[0].visual_tokens} of them visual ({workload.frames} frames of {workload.side} × {workload.side}); "
        f"{len(lengths)} responses of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):g}"
    )

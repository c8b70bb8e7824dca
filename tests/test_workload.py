"""workload.py: response lengths have the distribution asked for, and clips are the largest that fit."""

import statistics

import numpy as np
import pytest

import workload


def test_lengths_are_lognormal_cut_and_the_same_each_time():
    drawn = workload.draw_lengths(100, 400, 8, 0.5, 300, seed=3)
    flat = [length for row in drawn for length in row]
    assert (
        len(drawn) == 400
        and {len(row) for row in drawn} == {8}
        and drawn == workload.draw_lengths(100, 400, 8, 0.5, 300, 3)
    )
    assert drawn != workload.draw_lengths(100, 400, 8, 0.5, 300, 4) and max(flat) == 300 and min(flat) >= 1
    assert statistics.median(flat) == pytest.approx(100, rel=0.05)
    assert statistics.pstdev(np.log([x for x in flat if x < 300])) == pytest.approx(0.5, rel=0.1)
    assert set(workload.draw_lengths(7, 2, 3, 0.0, 99, 0)) == {(7, 7, 7)}


@pytest.mark.parametrize("wanted", [16, 19, 99, 144, 369, 1399, 5799])
def test_the_clip_is_the_largest_that_fits(wanted):
    frames, side = workload.clip_size(wanted, 3136, 602112)
    tokens = frames // 2 * (side // 28) ** 2
    assert frames % 2 == side % 28 == 0 and 3136 <= side * side <= 602112 and tokens <= wanted
    better = [(f, k) for f in range(2, 34, 2) for k in range(2, 28) if tokens < f // 2 * k * k <= wanted]
    assert not better
    same = [f for f in range(2, 34, 2) for k in range(2, 28) if f // 2 * k * k == tokens]
    assert abs(frames - 16) == min(abs(f - 16) for f in same)

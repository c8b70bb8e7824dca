"""formats.py: one small file of each published shape, and what it must be read as."""

import json
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest

from data import DataConfig
from decode import Clip, Limits, decode
from formats import DIRECTIONS, QUESTIONS, Row, make_synthetic, read_rows
from reward import reward

FIXTURES = Path(__file__).parent / "fixtures"


def media(kind, name, *times):
    return [Clip(kind, str(FIXTURES / name), *times)]


# ------------------------------------------------------------------------------------------ published formats


def test_video_r1():
    rows, skipped = read_rows(FIXTURES / "video_r1.json")
    assert not skipped and len(rows) == 6
    boy = media("video", "clips/boy.mp4")
    options = ["A. He sits", "B. He waves", "C. He leaves"]
    assert rows[0] == Row(
        "NeXT-QA", boy, "What does the boy do after he puts the cup down?", options, "B", "multiple choice"
    )
    balls = media("image", "pictures/balls.png")
    assert rows[1] == Row("CLEVR-Math", balls, "How many red balls are in the picture?", [], "3", "numerical")
    assert rows[2].source == "video_r1" and rows[2].problem_type == "OCR" and rows[2].solution == "NO ENTRY"
    assert rows[3].options == ["A) circle", "B) square"] and rows[3].solution == "A"
    assert [r.problem_type for r in rows[4:]] == ["regression", "free-form"] and rows[
        5
    ].solution == "The dog took his hat"


def test_clevrer_has_several_right_choices():
    rows, skipped = read_rows(FIXTURES / "clevrer.json")
    assert skipped == {"question without answer": 2}
    assert [(r.source, r.problem_type, r.solution) for r in rows] == [
        ("clevrer-descriptive", "numerical", "2"),
        ("clevrer-descriptive", "exact", "gray"),
        ("clevrer-explanatory", "multiple select", "A, C"),
        ("clevrer-predictive", "multiple select", "B"),
        ("clevrer-counterfactual", "multiple select", "none"),
    ]
    assert rows[2].options[1] == "B. The red sphere's entrance"
    assert all(r.media == media("video", "video_10000.mp4") for r in rows)


def test_perception_test():
    rows, skipped = read_rows(FIXTURES / "perception_test.json")
    assert skipped == {"question without answer": 1}
    assert [(r.source, r.solution) for r in rows] == [("perception-test-physics", "C"), ("perception-test-memory", "A")]
    assert rows[0].options == ["A. I don't know", "B. moving", "C. static or shaking"]
    assert rows[1].options == ["A. k", "B. a", "C. t"] and rows[1].media == media("video", "video_1007.mp4")


def test_llava_video_pairs_options_and_captions():
    rows, skipped = read_rows(FIXTURES / "llava_video_0_30_s_academic.json")
    assert skipped == {"caption": 1, "answer that names none of the options": 1}
    clip = media("video", "academic_source/NextQA/0001/1.mp4")
    options = ["A. A red umbrella", "B. A phone", "C. A bag", "D. Nothing"]
    assert rows[0] == Row("0_30_s_academic_v0_1", clip, "What is the woman holding?", options, "B", "multiple choice")
    second = media("video", "academic_source/NextQA/0001/2.mp4")
    assert [(r.question, r.solution) for r in rows[1:]] == [
        ("Why does the child run back?", "The child forgot the ball."),
        ("What color is the ball?", "It is yellow."),
    ]
    assert all(r.media == second and r.problem_type == "free-form" for r in rows[1:])


def test_star_is_cut_by_time_and_the_letter_found_by_text():
    rows, skipped = read_rows(FIXTURES / "star.json")
    assert skipped == {"question without answer": 1}
    assert rows[0].media == media("video", "6H78U.mp4", 1.5, 3.5) and rows[0].solution == "B"
    assert rows[0].source == "star-interaction" and rows[0].options[3] == "D. The blanket."
    assert rows[1].media == media("video", "6H78U.mp4", 0.0, 2.0) and rows[1].solution == "A"


def test_text_questions():
    rows, _ = read_rows(FIXTURES / "gsm8k.jsonl")
    assert [(r.solution, r.problem_type, r.media) for r in rows] == [
        ("67", "numerical", []),
        ("5,000", "numerical", []),
    ]
    rows, _ = read_rows(FIXTURES / "math.jsonl")
    assert [(r.solution, r.problem_type) for r in rows] == [("\\frac{1}{2}", "math"), ("2\\sqrt{2}", "math")]
    rows, skipped = read_rows(FIXTURES / "science.jsonl")
    assert skipped == {"question without answer": 1}
    assert [(r.solution, r.problem_type) for r in rows] == [
        ("B", "multiple choice"),
        ("B", "multiple choice"),
        ("B", "multiple choice"),
        ("19.6 N", "numerical"),
        ("3.0 × 10^8 m/s", "numerical"),
        ("photosynthesis", "exact"),
        ("Because air scatters short wavelengths more than long ones", "free-form"),
    ]
    assert rows[2].options == ["A. oxygen", "B. carbon dioxide"]


@pytest.mark.parametrize("name", sorted(p.name for p in FIXTURES.iterdir()))
def test_every_solution_earns_the_full_reward_and_nothing_does_not(name):
    rows, _ = read_rows(FIXTURES / name)
    for row in rows:
        assert reward(row, f"<answer>{row.solution}</answer>", True) == 1
        assert reward(row, "<answer></answer>", True) == 0 and reward(row, row.solution, True) == 0


def test_media_are_found_wherever_an_archive_unpacked_them(tmp_path):
    (tmp_path / "videos" / "video_10000-11000").mkdir(parents=True)
    (tmp_path / "videos" / "video_10000-11000" / "video_10000.mp4").touch()
    rows, _ = read_rows(FIXTURES / "clevrer.json", media_root=tmp_path)
    assert rows[0].media[0].path == str(tmp_path / "videos" / "video_10000-11000" / "video_10000.mp4")
    (tmp_path / "6H78U.mkv").touch()  # another extension than the format's usual one
    rows, _ = read_rows(FIXTURES / "star.json", media_root=tmp_path)
    assert rows[0].media[0].path == str(tmp_path / "6H78U.mkv")


# ------------------------------------------------------------------------------------------ files that are no dataset


@pytest.mark.parametrize(
    "content,format,message",
    [
        (None, "auto", "no such file; give a dataset's JSON file"),
        (b"", "auto", "not JSON"),
        (b"[]", "auto", r"expected at least one entry, got \[\]"),
        (b"{}", "auto", "expected at least one entry, got {}"),
        (b"3", "auto", "expected at least one entry, got 3"),
        (b'[{"problem": "x"', "auto", "not JSON"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "auto", "not text"),
        (b'[{"a": 1, "b": 2}]', "auto", r"not recognised from fields \['a', 'b'\]; name it with --data.format"),
        (b'["x"]', "auto", "not recognised from 'x'"),
        (b'[{"question": "x", "answer": "1"}]', "star", "1 of 1 entries do not fit the format star"),
        (b'[{"question": "x"}]', "auto", "no usable row; skipped: {'question without answer': 1}"),
        (b'[{"problem": "x", "problem_type": "OCR", "path": "a", "data_type": "audio"}]', "auto", "data_type 'audio'"),
    ],
)  # fmt: skip
def test_files_that_are_no_dataset_say_why(tmp_path, content, format, message):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_rows(path, format)
    assert str(caught.value).startswith(f"--data.path {path}: ")


def test_a_few_malformed_entries_are_counted_and_many_stop_the_start(tmp_path):
    table = json.loads((FIXTURES / "video_r1.json").read_text())
    table[1] = {"problem": 3}
    path = tmp_path / "data.json"
    path.write_text(json.dumps(table))
    rows, skipped = read_rows(path, max_bad_fraction=0.2)
    assert len(rows) == 5 and skipped == {"malformed entry": 1}
    with pytest.raises(
        ValueError, match="1 of 6 entries do not fit the format video-r1; the first is entry 1: no field 'data_type'"
    ):
        read_rows(path, max_bad_fraction=0.1)
    path.write_text("\n".join(json.dumps(t) for t in table))  # JSON lines under any name
    assert read_rows(path, max_bad_fraction=0.2)[0] == rows


# ------------------------------------------------------------------------------------------ the built-in task


def test_the_built_in_task_is_written_once_balanced_and_the_same_for_a_seed(tmp_path):
    config = DataConfig(synthetic_clips=16, synthetic_kinds=("color", "direction", "shape", "count"), seed=3)
    path = make_synthetic(tmp_path / "a", config)
    stamps = {p: p.stat().st_mtime_ns for p in path.parent.iterdir()}
    assert make_synthetic(tmp_path / "a", config) == path and all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    again = make_synthetic(tmp_path / "b", config)
    assert path.read_bytes() == again.read_bytes() and len(stamps) == 17
    assert all((again.parent / p.name).read_bytes() == p.read_bytes() for p in stamps)
    other = make_synthetic(tmp_path / "a", DataConfig(synthetic_clips=16, seed=4))
    assert other != path and len(list((tmp_path / "a").iterdir())) == 2  # no temporary folder stays
    rows, _ = read_rows(path)
    assert set(Counter((r.source, r.solution) for r in rows).values()) == {1}


def test_a_half_written_task_is_not_taken_for_a_whole_one(tmp_path):
    config = DataConfig(synthetic_clips=2)
    path = make_synthetic(tmp_path, config)
    left = path.parent.with_name(f".{path.parent.name}.123")  # as a killed process leaves it
    path.parent.rename(left)
    (left / "data.json").unlink()
    assert make_synthetic(tmp_path, config) == path and path.is_file()


@pytest.mark.parametrize("kind", ["color", "direction", "shape", "count"])
def test_the_answer_can_be_seen_in_the_decoded_frames(tmp_path, kind):
    config = DataConfig(synthetic_clips=12, synthetic_kinds=(kind,))
    rows, _ = read_rows(make_synthetic(tmp_path, config))
    for row in rows:
        frames, fps = decode(row.media[0], Limits(fps=4))
        assert frames.shape == (8, 56, 56, 3) and fps == 4
        assert seen(kind, frames.astype(int)) == QUESTIONS[kind][1]["ABCD".index(row.solution)]


def seen(kind, frames):
    """The answer by looking at pixels."""
    bright = frames.max(axis=3) > 120
    if kind == "color":
        r, g, b = frames[bright].mean(axis=0)
        return "yellow" if r > 150 and g > 150 else max(("red", r), ("green", g), ("blue", b), key=lambda c: c[1])[0]
    if kind == "direction":
        ys, xs = zip(*[np.argwhere(m).mean(axis=0) for m in (bright[0], bright[-1])], strict=True)
        moved = (xs[1] - xs[0], ys[1] - ys[0])
        return max(DIRECTIONS, key=lambda d: np.dot(DIRECTIONS[d], moved))
    if kind == "count":
        return str(count_blobs(bright[4]))
    ys, xs = np.nonzero(bright[4])
    fill = bright[4].sum() / ((np.ptp(ys) + 1) * (np.ptp(xs) + 1))
    half = (ys.min() + ys.max()) / 2
    if (ys > half).mean() > 0.62:
        return "triangle"
    return "cross" if fill < 0.66 else "circle" if fill < 0.88 else "square"


def count_blobs(mask):
    mask, count = mask.copy(), 0
    while mask.any():
        count += 1
        stack = [tuple(np.argwhere(mask)[0])]
        while stack:
            y, x = stack.pop()
            if 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and mask[y, x]:
                mask[y, x] = False
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return count


def test_clips_are_ordinary_mp4_files(tmp_path):
    path = make_synthetic(tmp_path, DataConfig(synthetic_clips=1))
    with av.open(str(path.parent / "00000.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec.name, stream.frames, stream.average_rate, stream.width) == ("h264", 8, 4, 56)

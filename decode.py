"""Decode: one image or video file on disk to the frames that the model sees, in worker processes.

    file ─► timestamps of all packets ─► choose frames ─► seek, decode, scale to RGB ─► [T, H, W, 3] uint8, fps
            (nothing decoded yet)        fps, even, ≤ F   multiples of 28, budgets      (or from the clip cache)

Sampling and sizes follow Qwen2.5-VL's rules. Sizes are fixed points of transformers' and vLLM's own resizing, so the
frames made here reach both unchanged. Header fields of real files lie (rate, duration, frame count), so only packet
timestamps are believed; headers serve to notice a file that breaks off. Whatever is wrong with a file ends in
BadSample(path, reason).

`Workers` runs functions in processes that import nothing but this file (and what the function's module needs): 0.2 s to
start and 60 MB each, a time limit that also stops C code, and one death fails one task alone.

Run:  python decode.py clip.mp4 …    what is taken from each file, and the speed against bare PyAV
Left out on purpose: decoding on a GPU, audio, non-square pixels.
"""

import ctypes
import hashlib
import math
import mmap
import os
import pickle
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.video.reformatter import Interpolation
from PIL import Image, ImageOps

FACTOR = 28  # pixels: patch size 14 times spatial merge 2; every frame side is a multiple of it
TEMPORAL = 2  # frames of one temporal patch
MAX_ASPECT = 200  # the processors refuse frames longer than this many times their width
# What Pillow and PyAV (whose errors derive from these) raise for a broken file.
_BROKEN = (OSError, ValueError, EOFError, SyntaxError, Image.DecompressionBombError)
# Titles that are not UTF-8 make PyAV 18 refuse the file unless told to ignore them; PyAV 19 has no such argument.
_LENIENT = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
# Without the last two flags swscale rounds down and colours come out up to two levels too dark.
_SCALING = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


@dataclass(frozen=True)
class Limits:
    """How a clip is sampled and sized; DataConfig explains each field."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 16
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 128 * 28 * 28
    total_pixels: int = 115_200 * 28 * 28


class Clip(NamedTuple):
    """A file, or the part of a video from `start` to `end` (seconds)."""

    kind: str  # image | video
    path: str
    start: float | None = None
    end: float | None = None


class BadSample(Exception):
    """A sample that cannot be used: `path` names the file (or row), `reason` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def decode(clip: Clip, limits: Limits, cache: str = "", cache_bytes: int = 0) -> tuple[np.ndarray, float]:
    """Frames [T, H, W, 3] uint8 RGB at their final size, and their rate per second (1.0 for an image).

    `cache` names a folder of decoded clips, kept below `cache_bytes` by dropping the least recently used.
    """
    try:
        stat = os.stat(clip.path)
        if stat.st_size == 0:
            raise BadSample(clip.path, "the file is empty")
        entry = _cache_entry(cache, clip, limits, stat) if cache else None
        if entry and (hit := _cache_read(entry)):
            return hit
        frames, fps = _decode_image(clip, limits) if clip.kind == "image" else _decode_video(clip, limits)
    except FileNotFoundError:
        raise BadSample(clip.path, "no such file") from None
    except _BROKEN as error:
        raise BadSample(clip.path, f"cannot decode: {getattr(error, 'strerror', None) or error}") from None
    if entry:
        _cache_write(entry, frames, fps, cache_bytes)
    return frames, fps


def frame_size(path: str, height: int, width: int, limits: Limits, frames: int = 1) -> tuple[int, int]:
    """Height and width in multiples of 28, near the given ones, within the pixel budgets.

    Qwen2.5-VL's rule (smart_resize), but always a size which that rule maps to itself: for extreme aspect ratios its
    own result can break the budget, and the next processor would resize once more.
    """
    low, high = limits.min_pixels, limits.max_pixels
    budget = max(min(high, int(limits.total_pixels * TEMPORAL / frames)), min(high, int(low * 1.05)))
    h, w = (round(side / FACTOR) * FACTOR for side in (height, width))
    if h * w > budget:
        scale = math.sqrt(height * width / budget)
        h, w = (max(FACTOR, int(side / scale / FACTOR) * FACTOR) for side in (height, width))
        h, w = min(h, budget // w // FACTOR * FACTOR), min(w, budget // h // FACTOR * FACTOR)
    if h * w < low:
        scale = math.sqrt(low / (height * width))
        h, w = (math.ceil(side * scale / FACTOR) * FACTOR for side in (height, width))
    if not (low <= h * w <= high) or max(h / w, w / h, height / width, width / height) > MAX_ASPECT:
        raise BadSample(path, f"{width}x{height} pixels: no size in multiples of 28 fits {low} to {high} pixels")
    return h, w


def sample_times(times: np.ndarray, step: float, limits: Limits) -> tuple[np.ndarray, float]:
    """Which of the frames shown at `times` (seconds, ascending; the last lasts `step`) to take, and the resulting rate.

    n = duration * fps, within [min_frames, max_frames] and the frames there are, even; then the frames on display at n
    evenly spaced moments. A single frame is taken twice, at the asked rate.
    """
    if len(times) == 1:
        return np.zeros(TEMPORAL, dtype=np.int64), float(limits.fps)
    duration = times[-1] - times[0] + step
    n = min(max(int(duration * limits.fps + 1e-6), limits.min_frames), limits.max_frames, len(times))
    n -= n % TEMPORAL
    moments = times[0] + np.arange(n) * (duration / n)
    return np.searchsorted(times, moments + step * 1e-3, side="right") - 1, float(n / duration)


# ---------------------------------------------------------------------------------------------- one file


def _decode_image(clip: Clip, limits: Limits) -> tuple[np.ndarray, float]:
    with Image.open(clip.path) as file:
        image = ImageOps.exif_transpose(file)
        h, w = frame_size(clip.path, image.height, image.width, limits)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return np.array(image.convert("RGB").resize((w, h), Image.Resampling.BICUBIC))[None], 1.0


def _decode_video(clip: Clip, limits: Limits) -> tuple[np.ndarray, float]:
    index = _index(clip)
    pts = index.pts[index.inside]
    chosen, fps = sample_times((pts - pts[0]) * index.unit_s, index.step_s, limits)
    chosen += index.inside.start
    for way in ("seek", "time", "count") if index.timed else ("count",):  # the next one when index and decoder disagree
        if way == "count" and clip.start and index.timed:
            break  # the index starts in the middle of the file
        frames = _read(clip, index, chosen, limits, way)
        if frames is not None:
            return frames, fps
    raise BadSample(clip.path, "its frames cannot be told apart by their times")


def _open(path: str) -> tuple[av.container.InputContainer, av.video.stream.VideoStream]:
    container = av.open(path, **_LENIENT)
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        container.close()
        raise BadSample(path, "no video stream (audio only?)")
    streams[0].codec_context.thread_count = 1  # the worker processes are the parallelism
    return container, streams[0]


class _Index(NamedTuple):
    pts: np.ndarray  # timestamps of frames, ascending: the whole file, or from a key frame before the clip's start
    keys: np.ndarray  # those of key frames
    inside: slice  # the clip's frames
    unit_s: float  # seconds of one timestamp unit
    step_s: float  # how long the last frame lasts
    timed: bool  # frames leave the decoder with these timestamps


def _index(clip: Clip) -> _Index:
    """The clip's frames, without decoding one."""
    container, stream = _open(clip.path)
    with container:
        unit_s, rate = float(stream.time_base), float(stream.average_rate or stream.guessed_rate or 25)
        timed = container.format.name not in ("avi", "h264", "hevc", "m4v")  # these store no times of display
        origin = stream.start_time or 0
        low = -math.inf if clip.start is None else origin + clip.start / unit_s
        high = math.inf if clip.end is None else origin + clip.end / unit_s
        if clip.start and timed:
            container.seek(int(low), stream=stream)
        packets = []
        for packet in container.demux(stream):
            if packet.dts is not None and packet.dts > high and timed:
                break
            if packet.size and not packet.is_discard:
                packets.append((packet.pts if timed else packet.dts, packet.is_keyframe, packet.duration or 0))
        header_s = (
            float(stream.duration * stream.time_base) if stream.duration else (container.duration or 0) / av.time_base
        )
        header_frames = stream.frames
    if not packets:
        raise BadSample(clip.path, "no video frames")
    if any(time is None for time, _, _ in packets):  # a raw stream: frames in order at the nominal rate
        packets, timed = [(round(i / rate / unit_s), key, 0) for i, (_, key, _) in enumerate(packets)], False
    pts = np.unique([time for time, _, _ in packets])
    step_s = float(statistics.median(np.diff(pts)) * unit_s if len(pts) > 1 else 1 / rate)
    end = max(pts[-1] + step_s / unit_s, max(time + length for time, _, length in packets))
    inside = slice(*np.searchsorted(pts, (low - 1e-3 * step_s / unit_s, high)))
    _check_extent(clip, inside.start < inside.stop, len(packets), header_frames, (end - origin) * unit_s, header_s)
    return _Index(pts, np.unique([time for time, key, _ in packets if key]), inside, unit_s, step_s, timed)


def _check_extent(clip: Clip, some: bool, count: int, header_frames: int, end_s: float, header_s: float) -> None:
    """Does the file hold what its header (or the clip) says? BadSample if it breaks off."""
    if clip.start is not None or clip.end is not None:
        start_s, until_s = clip.start or 0.0, min(clip.end or math.inf, header_s or math.inf)
        if not some or (until_s < math.inf and end_s < until_s - 0.2 * (until_s - start_s)):
            asked = f"from {start_s:g} s" + (f" to {clip.end:g} s" if clip.end else "")
            raise BadSample(clip.path, f"the part {asked} is not in the file's {end_s:.1f} s")
    elif count < 0.9 * (header_frames or math.inf) and end_s < (0.9 if header_frames else 0.8) * header_s:
        there = f"{count} of {header_frames or '?'} frames, {end_s:.1f} of {header_s:.1f} s"
        raise BadSample(clip.path, f"the file breaks off: {there}")


def _read(clip: Clip, index: _Index, chosen: np.ndarray, limits: Limits, way: str) -> np.ndarray | None:
    """The chosen frames (indices into index.pts, ascending) at their final size; None when they cannot be had this way.

    seek: jump to key frames over what is not needed, and insist on exact timestamps. time: decode from the start of the
    file and take the first frame at or after each time. count: the k-th frame belongs to the k-th timestamp.
    """
    pts, keys = index.pts, index.keys
    result = None
    container, stream = _open(clip.path)
    with container:
        frames, frame, count, at = container.decode(stream), None, 0, -math.inf
        reached = keys[0] if len(keys) and not clip.start else -math.inf
        for i in np.unique(chosen):
            before = keys[: np.searchsorted(keys, pts[i], side="right")]
            if way == "seek" and len(before) and before[-1] > reached:
                container.seek(int(before[-1]), stream=stream)
                frames, at = container.decode(stream), -math.inf
            while at < pts[i]:
                frame, count = next(frames, None), count + 1
                if frame is None:
                    if way == "seek":
                        return None
                    raise BadSample(clip.path, f"only {count - 1} of {len(pts)} frames can be decoded")
                previous, at = at, pts[min(count, len(pts)) - 1] if way == "count" else frame.pts
                if way != "count" and (at is None or at < previous):
                    return None
            reached = at
            if way == "seek" and (at != pts[i] or frame.is_corrupt):
                return None
            if frame.is_corrupt:
                raise BadSample(clip.path, f"the frame at {float(pts[i] * stream.time_base):.2f} s is damaged")
            if result is None:  # the first frame's size holds for all, should the stream change it
                size = frame_size(clip.path, *_upright_size(frame), limits, len(chosen))
                result = np.empty((len(chosen), *size, 3), dtype=np.uint8)
            result[chosen == i] = _finish(frame, size)  # one that is on display for long may be taken more than once
    return result


def _upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """Height and width once rotation metadata (degrees counter-clockwise) is applied."""
    turned = round(frame.rotation / 90) % 2
    return (frame.width, frame.height) if turned else (frame.height, frame.width)


def _finish(frame: av.VideoFrame, size: tuple[int, int]) -> np.ndarray:
    """Scale to [*size, 3] and convert to RGB in one pass, then turn upright."""
    turns = round(frame.rotation / 90) % 4
    h, w = size[::-1] if turns % 2 else size
    image = frame.reformat(width=w, height=h, format="rgb24", interpolation=_SCALING, threads=1).to_ndarray()
    return np.rot90(image, turns) if turns else image


# ---------------------------------------------------------------------------------------------- cache of decoded clips


def _cache_entry(cache: str, clip: Clip, limits: Limits, stat: os.stat_result) -> Path:
    key = repr((1, tuple(clip), limits, stat.st_mtime_ns, stat.st_size))
    return Path(cache) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _cache_read(entry: Path) -> tuple[np.ndarray, float] | None:
    try:
        with np.load(entry) as file:  # checks a checksum
            found = file["frames"], float(file["fps"])
        os.utime(entry)  # the age by which entries are dropped
        return found
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # absent, just dropped by another worker, or damaged
        return None


def _cache_write(entry: Path, frames: np.ndarray, fps: float, cache_bytes: int) -> None:
    temporary = entry.with_suffix(f".{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, frames=frames, fps=fps)
        temporary.rename(entry)
        entries = [(e.stat().st_mtime_ns, e.stat().st_size, e.path) for e in os.scandir(entry.parent)]
        excess = sum(size for _, size, _ in entries) - cache_bytes
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            Path(path).unlink(missing_ok=True)
            excess -= size
    except FileNotFoundError:
        pass  # another worker is dropping entries at the same moment
    except OSError as error:  # not the clip's fault: the run stops
        raise RuntimeError(
            f"--data.cache-gib: cannot write below {entry.parent} ({error}); free space or set it to 0"
        ) from error


# ---------------------------------------------------------------------------------------------- worker processes


class WorkerDied(Exception):
    """The process that ran a task ended: the message says how."""


class Workers:
    """Processes that run module-level functions, each call under a time limit that ends the process.

    A plain subprocess rather than a multiprocessing pool, which would run the trainer's main module again in each
    worker, fail every pending task with one death, and could not stop a task stuck in C code. Workers end with their
    parent, whatever ends it.
    """

    def __init__(self, count: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._processes: list[subprocess.Popen] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._dispatch, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function, *arguments) -> Future:
        """Run function(*arguments) in some worker. The future raises what the function raised, or WorkerDied."""
        future: Future = Future()
        self._tasks.put((future, (self.limit_s, function, arguments)))
        return future

    def close(self) -> None:
        """Kill and reap all workers; what is still pending fails with WorkerDied."""
        self._closed = True
        for process in list(self._processes):
            process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _dispatch(self) -> None:
        """One thread for each worker: hand over a task, wait for the answer, replace the worker if it died."""
        process = pipe = None
        while (item := self._tasks.get()) is not None:
            future, request = item
            if self._closed:
                future.set_exception(WorkerDied("was closed"))
                continue
            try:
                if process is None:
                    process, pipe = self._spawn()
                pipe.send(request)
                error, value = _receive(pipe)
            except Exception as failure:  # nothing may end this thread, or futures would never be done
                ended = isinstance(failure, (EOFError, OSError)) and process is not None
                if process is not None:
                    pipe.close()
                    reason = self._how_it_ended(process)
                future.set_exception(WorkerDied(reason) if ended else failure)
                process = None
                continue
            if error:
                future.set_exception(value)
            else:
                future.set_result(value)
        if process is not None:
            pipe.close()
            self._how_it_ended(process)

    def _spawn(self) -> tuple[subprocess.Popen, Connection]:
        ours, theirs = Pipe()
        here = str(Path(__file__).resolve().parent)
        code = (
            f"import sys; sys.path.insert(0, {here!r}); import decode; decode.serve({theirs.fileno()}, {os.getpid()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._processes.append(process)
        if self._closed:  # close() may have passed already
            process.kill()
        return process, ours

    def _how_it_ended(self, process: subprocess.Popen) -> str:
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._processes.remove(process)
        if code == -signal.SIGALRM:
            return f"took longer than {self.limit_s:g} s"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def serve(fd: int, parent: int) -> None:
    """A worker's main loop: (limit, function, arguments) in, (is it an error, value) out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, even in the middle of a task
    if os.getppid() != parent:
        return
    pipe = Connection(fd)
    while True:
        try:
            limit_s, function, arguments = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process, whatever code is running
        try:
            answer = (False, function(*arguments))
        except Exception as error:  # crosses the pipe and is raised again by the parent's future
            known = type(error).__module__ in ("builtins", __name__)  # the parent may not have another's class
            answer = (True, error if known else RuntimeError(f"{type(error).__name__}: {error}"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(pipe, answer)


def _send(pipe: Connection, answer: object) -> None:
    """Arrays go through anonymous shared memory, whose descriptor follows the rest: nothing to clean up, one copy."""
    arrays: list[pickle.PickleBuffer] = []
    content = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    pipe.send((content, [view.nbytes for view in views]))
    if views:
        fd = os.memfd_create("frames")
        with open(fd, "wb", buffering=0) as file:
            for view in views:
                while view.nbytes:
                    view = view[file.write(view) :]
            reduction.send_handle(pipe, fd, None)


def _receive(pipe: Connection) -> object:
    content, sizes = pipe.recv()
    if not sizes:
        return pickle.loads(content)
    fd = reduction.recv_handle(pipe)
    try:
        memory = memoryview(mmap.mmap(fd, sum(sizes)))  # unmapped when the last array on it is gone
    finally:
        os.close(fd)
    ends = np.cumsum(sizes)
    return pickle.loads(content, buffers=[memory[end - size : end] for end, size in zip(ends, sizes, strict=True)])


def main() -> None:
    for path in sys.argv[1:]:
        try:
            begin = time.perf_counter()
            frames, fps = _decode_video(Clip("video", path), Limits(max_frames=768))
            ours_s = time.perf_counter() - begin
        except BadSample as error:
            print(error)
            continue
        begin = time.perf_counter()
        with av.open(path) as container:
            total = sum(1 for frame in container.decode(video=0) if frame.to_ndarray(format="rgb24") is not None)
        bare_s = time.perf_counter() - begin
        print(f"{path}: {frames.shape} of {total} frames, {fps:.3g}/s", end="; ")
        print(f"{ours_s * 1e3:.0f} ms, all frames by bare PyAV {bare_s * 1e3:.0f} ms")


if __name__ == "__main__":
    main()

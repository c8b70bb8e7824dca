"""engine.py: which prompts share a step, prompts prepared beforehand, and an engine that ends or stops reading."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_rollout import CONFIG, MAX_PROMPT, QUESTION, Policy, clip, generate, gone_within, shared_memory

import configs
import rollout
from rollout import EngineClient, EngineDied, Request

# B prompts, N responses per prompt, P prompt tokens, V vocabulary.


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy(tmp_path_factory.mktemp("models"))


# ---- generation ------------------------------------------------------------------------------------------------------


def test_groups_are_admitted_as_they_fit(policy, tmp_path):
    """Which groups share a step, from lengths alone: 256 tokens a step, less one for each response in progress; a group
    of two takes 40 of them if its prompt has 20, and 172 if it has 150 (22 are behind its last full block of 32)."""
    config = replace(CONFIG, max_num_batched_tokens=256, max_num_seqs=64)
    prompts = [[40 + i] * (150 if i in (3, 7) else 20) for i in range(10)]
    requests = [Request(str(i), ids, [], 2, seed=i, lengths=(4, 4)) for i, ids in enumerate(prompts)]
    small, large = [requests[i] for i in (0, 1, 2, 4, 5, 6, 8)], [requests[i] for i in (0, 1, 3, 7, 8, 9)]
    forbidden, runs = configs.forbidden_ids(policy.config), []
    with EngineClient(
        config, policy.binding, engine=5, max_prompt_tokens=MAX_PROMPT, forbidden_ids=forbidden, run_dir=tmp_path
    ) as client:
        client.ready()
        for group in (small, large, small, large):
            client.publish(0)  # forget the prompts
            client.take_stats()
            responses, stats = generate(client, *group), client.take_stats()
            steps = [(work.kind, work.steps, work.tokens) for work in stats.timeline]
            runs.append((steps, stats.cached_tokens, [(r.token_ids, r.logprobs) for r in responses]))
    wait = ("preprocess", 1, 0)
    # Six small ones; the seventh and two tokens each of six.
    assert runs[0][:2] == ([wait, ("prefill", 1, 12), wait, ("prefill", 1, 14), ("decode", 3, 30)], 0)
    # Two small ones and a large one, 252 of 256; a large one and a small one, 212 of 250; the last would make it 252.
    mixed = [wait, ("prefill", 1, 6), wait, ("prefill", 1, 10), wait, ("prefill", 1, 12), ("decode", 3, 20)]
    assert runs[1][:2] == (mixed, 2 * 128)
    assert runs[2:] == runs[:2]


# ---- prompts prepared beforehand ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(policy, tmp_path_factory):
    """An engine for prompts of 1058 tokens, each of which takes some 15 ms to preprocess."""
    config, forbidden = replace(CONFIG, kv_cache_gib=1 / 8), configs.forbidden_ids(policy.config)
    root = tmp_path_factory.mktemp("run")
    with EngineClient(
        config, policy.binding, engine=6, max_prompt_tokens=1200, forbidden_ids=forbidden, run_dir=root
    ) as client:
        client.ready()
        yield client


@pytest.fixture(scope="module")
def requests(policy):
    """Four long videos, and more short ones than are preprocessed at once."""
    text, shapes = QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), [(32, 224)] * 4 + [(4, 56)] * 16
    prompts = [policy.prompt(text, clip(frames, side, seed=i)) for i, (frames, side) in enumerate(shapes)]
    return [Request(str(i), p.ids, p.media, 2, seed=i) for i, p in enumerate(prompts)]


def fresh(client, *requests: Request) -> tuple[list, list, float]:
    """What an engine without caches answers, in which steps, and how long it waited for preprocessing (s)."""
    client.publish(0)
    client.take_stats()
    responses = generate(client, *requests)
    timeline = client.take_stats().timeline
    waited_s = sum(work.end_ns - work.start_ns for work in timeline if work.kind == "preprocess") / 1e9
    answers = [(r.request_id, r.index, r.token_ids, r.logprobs, r.finish_reason, r.prompt_ids) for r in responses]
    return answers, [(work.kind, work.steps, work.tokens) for work in timeline], waited_s


def preprocessed(client) -> None:
    """Wait until the engine has preprocessed all that it was told to: there is one thread for it, first come first
    served."""
    client.positions(Request("last", [9], [], 1, seed=0))


def test_a_prepared_call_is_the_same_without_the_wait(client, requests):
    """With what a trainer does in between: KV pages gone and back, weights published."""
    plain = fresh(client, *requests)
    client.release_kv()
    client.prepare(requests)
    client.publish(1)
    preprocessed(client)
    client.restore_kv()
    prepared = fresh(client, *requests)
    again = fresh(client, *requests)
    assert prepared[:2] == plain[:2] == again[:2]
    assert prepared[2] < min(plain[2], again[2]) / 2, (plain[2], prepared[2], again[2])


def test_preparing_reads_no_weights(client, requests, policy):
    before = policy.bytes.clone()
    old, *_ = fresh(client, *requests[:2])
    client.prepare(requests[:2])
    preprocessed(client)
    for name, view in policy.views.items():
        if name.startswith("visual.merger"):
            view.mul_(-3)
    new, *_ = fresh(client, *requests[:2])
    again, *_ = fresh(client, *requests[:2])
    policy.bytes.copy_(before)
    assert new == again != old


def test_what_differs_from_what_was_prepared_is_not_taken_for_it(client, requests):
    """Other media, other ids and other words under the same id are another prompt; the rest of a request may differ."""
    first, second, third = requests[:3]
    other = [replace(second, id="0"), replace(third, id="1", prompt_ids=[40, *third.prompt_ids])]
    sampled = replace(third, seed=7, temperature=0.5, n=3, lengths=(3, 2, 4))
    wanted, *_ = fresh(client, *other, sampled)
    client.prepare([first, replace(third, id="1"), third])
    assert fresh(client, *other, sampled)[0] == wanted != fresh(client, first, second, sampled)[0]


def test_an_abort_leaves_what_is_prepared(client, requests):
    """Prepared beside a call that is aborted, then begun and aborted itself."""
    plain = fresh(client, *requests)
    client.generate([Request(f"busy{i}", [9, 10], [], 16, seed=i) for i in range(20)])
    client.prepare(requests)
    client.abort()
    preprocessed(client)
    assert any(response.finish_reason == "abort" for response in client.wait())
    prepared = fresh(client, *requests)
    assert prepared[:2] == plain[:2] and prepared[2] < plain[2] / 2
    client.prepare(requests)
    client.generate(requests)
    client.abort()
    assert len(client.wait()) == 2 * len(requests)
    assert fresh(client, *requests)[:2] == plain[:2]


def test_a_prompt_that_cannot_be_used_is_refused_when_it_is_asked_for(client, requests):
    long = Request("long", [9] * 1201, [], 2, seed=0)
    client.prepare([long, requests[0]])
    preprocessed(client)
    with pytest.raises(RuntimeError, match=r"refused a request: long: .*the limit is 1200"):
        generate(client, long, requests[0])
    client.prepare([long])
    generate(client, requests[0])  # nobody asked


def test_what_was_prepared_for_nothing_is_let_go(client, policy):
    """Eight long videos are 200 MB as pixels and frames; only those of the last order may remain."""
    text, held = QUESTION.format("<|vision_start|><|video_pad|><|vision_end|>"), []
    for turn in range(6):
        prompts = [policy.prompt(text, clip(32, 224, seed=100 + 8 * turn + i)) for i in range(8)]
        client.prepare([Request(f"{turn}/{i}", p.ids, p.media, 1, seed=i) for i, p in enumerate(prompts)])
        preprocessed(client)
        held.append(client.report()[0]["rss_bytes"])
    client.prepare([])
    assert held[-1] - held[0] < 200 << 20, held


# ---- ends while prompts are being sent -------------------------------------------------------------------------------


def large_requests(n: int = 40) -> list[Request]:
    """Nearly 5 MB of frames each, and all of them far more than a socket holds."""
    media = [SimpleNamespace(kind="video", frames=clip(32, 224, seed=i), fps=2.0) for i in range(n)]
    return [Request(str(i), [9], [medium], 1, seed=i) for i, medium in enumerate(media)]


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("engine 7 ")]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_ends_while_prompts_are_sent(policy, tmp_path, end):
    """Killed, or frozen, when some have arrived: the next command says so in time and nothing is left of the engine."""
    config, forbidden = replace(CONFIG, silence_timeout_s=3), configs.forbidden_ids(policy.config)
    with EngineClient(
        config, policy.binding, engine=7, max_prompt_tokens=MAX_PROMPT, forbidden_ids=forbidden, run_dir=tmp_path
    ) as client:
        client.ready()
        names, pid = shared_memory(client.process.pid), client.process.pid
        client.prepare(large_requests())
        time.sleep(0.02)
        os.kill(pid, end)
        start = time.monotonic()
        with pytest.raises(EngineDied, match=r"engine 7 .* in phase 'publish'; exit code -9; last message: ready"):
            client.publish(1)
        assert time.monotonic() - start < 3 + 1.5  # and what it takes to end the process
        assert gone_within(pid, 0) and not [name for name in names if Path(name).exists()]
        with pytest.raises(EngineDied, match="engine 7 "):
            client.prepare([])
    assert not client_threads()


@pytest.mark.parametrize("caller", ["thread", "signal handler", "owner"])
def test_stop_does_not_wait_for_an_engine_that_reads_nothing(policy, tmp_path, caller):
    """Frozen before it can read; stopped from wherever, also while a command waits behind prompts half sent."""
    client = EngineClient(CONFIG, policy.binding, engine=7, max_prompt_tokens=64, forbidden_ids=[], run_dir=tmp_path)
    os.kill(client.process.pid, signal.SIGSTOP)
    client.prepare(large_requests())
    start, ended = time.monotonic(), []

    def stop(*_) -> None:
        client.stop()
        ended.append(time.monotonic() - start)

    if caller == "owner":
        stop()
    else:
        handled = signal.signal(signal.SIGUSR1, stop)
        late = threading.Timer(0.5, stop if caller == "thread" else lambda: os.kill(os.getpid(), signal.SIGUSR1))
        late.start()
        with pytest.raises(EngineDied, match="engine 7 was stopped in phase"):
            client.publish(1)
        late.join()
        signal.signal(signal.SIGUSR1, handled)
    assert ended[0] < 15 and gone_within(client.process.pid, 0) and not client_threads()
    client.stop()  # once more is no fault
    with pytest.raises(EngineDied, match="engine 7 was stopped"):
        client.prepare([])


def test_a_trainer_that_ends_does_not_wait_for_what_it_is_sending(policy, tmp_path):
    """Its engine reads nothing, and it ends by an exception, without stop()."""
    source = (
        "import os, signal, time, rollout\n"
        "from test_engine import large_requests\n"
        f"client = rollout.EngineClient(rollout.RolloutConfig(), rollout.{policy.binding!r}, engine=7,"
        f" max_prompt_tokens=64, forbidden_ids=[], run_dir={str(tmp_path)!r})\n"
        "time.sleep(1)\n"
        "os.kill(client.process.pid, signal.SIGSTOP)\n"
        "client.prepare(large_requests())\n"
        "print(client.process.pid, flush=True)\n"
        "raise KeyError('of the trainer')\n"
    )
    roots = [str(Path(rollout.__file__).parent), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    pid = int(trainer.stdout.readline())
    try:
        assert "of the trainer" in trainer.communicate(timeout=10)[1] and gone_within(pid, 5)
    finally:
        trainer.kill()
        for left in rollout._session_members(pid):  # only if the test fails
            os.kill(left, signal.SIGKILL)

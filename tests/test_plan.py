"""plan.py: weights against what is really allocated, peaks against a walk through the step, the command line."""

import math
import resource
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch

import configs
import plan
import settings
import sizes
import weights
from memory import MemoryConfig
from sizes import Workload

# ---- weights, and the paper's Table 1 --------------------------------------------------------------------------------


def test_nominal_parameters_give_the_papers_table():
    """Weight rows from 32.5 B to 0.1 GiB; the preserved KV from the whole batch in both roles; its rows' own sum."""
    w = Workload(prompt_tokens=8192, response_tokens=2048)
    rows = {name: row for name, *row in plan.table1(configs.load_config("qwen2.5-vl-32b"), w)}
    nominal = [round(row[1], 1) for row in rows.values() if row[1]]
    assert nominal == [7.6, 15.1, 15.1, 30.3, 7.6, 15.1] == [row[2] for row in rows.values() if row[1]]
    assert rows["actor: preserved prefix KV"][0] == 16.0 == rows["actor: preserved prefix KV"][2]
    paper = {name: row[2] for name, row in rows.items()}
    assert sum(paper.values()) - paper["total"] - paper["rollout: runtime buffers"] == pytest.approx(164.1)
    assert rows["total"][0] == pytest.approx(sum(row[0] for row in rows.values()) - rows["total"][0])


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen2.5-vl-7b"])
def test_parameters_are_those_of_transformers(name):
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = configs.load_config(name)
    with torch.device("meta"):
        expected = sum(p.numel() for p in Qwen2_5_VLForConditionalGeneration(config).parameters())
    p = plan.plan(config, 1, 1, 1, Workload(qkv="split"), MemoryConfig())
    optimizer = p.peak("3").bytes
    assert optimizer["gradient"] == 4 * expected and p.host["FP32 master weights and moments"] == 12 * expected
    assert 2 * expected <= optimizer["snapshot"] < 2 * expected * 1.0001  # and alignment


def test_fused_qkv_is_the_papers_case_3():
    """7.2 % of the language model; the trainer keeps an eighth of it beside the snapshot."""
    config = configs.load_config("qwen2.5-vl-32b")
    counts = weights.coverage([row for row in weights.table(config) if not row.hf.startswith("visual.")])
    shares = [100 * counts[case] / sum(counts.values()) for case in (1, 2, 3)]
    assert shares == pytest.approx([60.0, 32.8, 7.2], abs=0.1)
    fused, split = (
        plan.plan(config, 8, 8, 4, Workload(qkv=qkv), MemoryConfig()).peak("3").bytes for qkv in ("fused", "split")
    )
    assert fused["snapshot"] - split["snapshot"] == pytest.approx(2 * counts[3] / 8, rel=1e-3)


# ---- windows ---------------------------------------------------------------------------------------------------------


def _walk(p: plan.Plan, state: dict) -> dict[str, int]:
    """Peak of each phase, whether the rollout leaves time for all prefixes that may wait or for none."""
    walks = [_walk_once(p, state, begun) for begun in (True, False)]
    return {phase: max(peaks.get(phase, 0) for peaks in walks) for phase in walks[1]}


def _walk_once(p: plan.Plan, state: dict, begun: bool) -> dict[str, int]:
    """Peak of each phase by taking every step of sched.py's schedule one object at a time, all prompts of full length;
    no temporaries. Under "later" the peak around prefixes that could not wait beside decode, or were not begun."""
    w, policy, peaks, held = p.workload, p.policy, {}, {}
    groups, mb = w.prompts * p.train_tp // p.world, max(1, w.micro_tokens // w.prompt_tokens)
    batches = [min(mb, groups - i) for i in range(0, groups, mb)]
    config, tp, kind, again = p.hf_config, p.train_tp, policy.activations, policy.recompute_layers
    edge, saved = sizes.boundary_bytes(config, w, tp), sizes.prefix_bytes(config, w, tp, again)
    held_twice = 0 if again else edge * 27 // 28
    waiting = sizes.prefix_bytes(config, w, tp, again, policy.recompute_vision) - held_twice
    most, ahead = (kind == "keep" and policy.keep_tokens) or groups * w.prompt_tokens, w.overlap == "prefix"
    early = ahead and begun
    waits = [early and sum(batches[: i + 1]) * w.prompt_tokens <= most for i in range(len(batches))]

    def put(phase: str, tag: str, nbytes: int) -> None:
        held[tag] = held.get(tag, 0) + nbytes
        assert held[tag] >= 0
        peaks[phase] = max(peaks.get(phase, 0), sum(held.values()))

    def reference(phase: str, sign: int) -> None:
        if policy.reference_paging:
            put(phase, "reference", sign * state["reference"])

    def prefix(phase: str, size: int, kept: int) -> None:
        put(phase, "actor_boundary", size * edge)
        if kind == "keep":
            put(phase, "prefix_activations", size * kept)
        if kind == "offload":  # all of it at once, then gone
            put(phase, "prefix_activations", size * saved)
            put(phase, "prefix_activations", -size * saved)

    def suffixes(phase: str, size: int, token_bytes: int) -> None:
        left, whole = size * w.n, max(1, w.micro_tokens // w.response_tokens)  # responses
        while left > 0:
            tokens = min(left, whole) * w.response_tokens
            put(phase, "suffix_activations", tokens * token_bytes)
            put(phase, "suffix_activations", -tokens * token_bytes)
            left -= whole

    put("1", "snapshot", state["snapshot"])
    for tag, there in state["always"].items():
        put("1", tag, there)
    if policy.engine_release:
        put("1", "rollout_kv", p.kv_bytes)
    if early:
        reference("1", +1)
        for size in batches:
            put("1", "reference_boundary", size * edge)
        reference("1", -1)
        for size in (size for size, beside in zip(batches, waits, strict=True) if beside):
            prefix("1", size, waiting)
    if policy.engine_release:
        put("2", "rollout_kv", -p.kv_bytes)
        del peaks["2"]
    put("2", "logprobs", groups * w.n * w.response_tokens * 17)
    reference("2", +1)
    for size in batches:
        if not early:
            put("2", "reference_boundary", size * edge)
        put("2", "reference_boundary", -size * edge)
    reference("2", -1)
    put("2", "gradient", state["gradient"])
    for i, (size, beside) in enumerate(zip(batches, waits, strict=True)):
        phase, kept = "later" if ahead and not beside else "2", waiting if beside else saved - held_twice
        if i == len(batches) - 1:
            put(phase, "chunks", state["chunks"])  # loaded ahead
        if not beside:
            prefix(phase, size, kept)
        suffixes(phase, size, sizes.suffix_token_bytes(config, w, tp, again))
        if again:
            suffixes(phase, size, sizes.suffix_again_token_bytes(config, w, tp))
        second = saved + edge // (1 if again else 28)  # keys and values too, in all layers or in the last
        consumed = 0 if kind == "keep" else size * (state["layer"] if kind == "offload" else second)
        consumed += size * sizes.prefix_again_bytes(config, w, tp) if again and kind != "offload" else 0
        put(phase, "prefix_activations", consumed)
        put(phase, "prefix_activations", -consumed - (size * kept if kind == "keep" else 0))
        put(phase, "actor_boundary", -size * edge)
    put("3", "logprobs", -held["logprobs"])
    del peaks["3"]
    put("3", "workspace", state["workspace"])
    return peaks | {"2": max(peaks.get("2", 0), peaks.get("later", 0))}


def _state(config, w: Workload, off: str | None = None, kv_bytes: int = 0) -> dict:
    """What _walk() needs to know at train TP 4 and rollout TP 2, where the policy `off` is off."""
    layout = weights.layout(config, 4, 2, "fused", torch.bfloat16)
    numel = sum(math.prod(shard.storage) for shard in weights.shards(layout, 0))
    whole = {"engine_weights": layout.nbytes, "rollout_kv": kv_bytes, "reference": 2 * numel}
    whole["optimizer_state"] = 12 * numel
    tags = {"engine_release": "rollout_kv", "reference_paging": "reference", "weight_sharing": "engine_weights"}
    tag = (tags | {"state_offload": "optimizer_state"}).get(off)
    # What one layer saves; of eight slices of 128 tokens, or of five, a rank of four has two.
    layer = max(999 * sizes.layer_bytes(sizes.dims(config, 4), w), 4 * 256 * sizes.vision_bytes(config, w) // 32)
    state = dict(snapshot=layout.nbytes + weights.fused_nbytes(layout), gradient=4 * numel, reference=2 * numel)
    slot = int(w.chunk_mib * 2**20) // (32 * 12) * 32 * 12  # 12 bytes a parameter, in multiples of 32
    ahead = min(int(w.ahead_gib * 2**30) // slot, math.ceil(12 * numel / slot) - 3)
    state |= dict(workspace=3 * slot, chunks=max(0, ahead) * slot)
    return state | dict(layer=layer, always={tag: whole[tag]} if tag else {})


@pytest.mark.parametrize("off", [None, "engine_release", "reference_paging", "weight_sharing", "state_offload"])
@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("layers", [False, True])
def test_peaks_equal_a_walk_through_the_step(off, overlap, activations, layers):
    """Micro-batches of one prompt, several, all; passes of one response that is longer than micro_tokens, several, all.
    Prompts are all media, or all in one micro-batch: shorter ones cannot bring more media into one then."""
    config, policy = configs.load_config("qwen2.5-vl-7b"), MemoryConfig(activations, recompute_layers=layers)
    policy = replace(policy, **{off: False}) if off else policy
    cases = (1000, 1000, 500, 64.0), (2000, 1000, 40, 64.0), (4000, 1000, 1000, 4096.0), (500, 1000, 2000, 64.0)
    for micro_tokens, visual, response, chunk in (*cases, (8000, 600, 1000, 64.0)):
        w = Workload(8, 8, 1000, visual, response, micro_tokens, overlap=overlap, chunk_mib=chunk, device="cpu")
        p = plan.plan(config, 4, 4, 2, w, policy)
        walked = _walk(p, _state(config, w, off, p.kv_bytes))
        assert {phase: p.peak(phase).total for phase in "123"} == {k: walked[k] for k in "123"}, (
            micro_tokens,
            response,
        )


@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("again", ["none", "vision", "layers"])
@pytest.mark.parametrize("micro_tokens", [1000, 2000, 4000])
def test_kept_prefixes_equal_a_walk_through_the_step(overlap, again, micro_tokens):
    """--memory.keep-tokens: exactly in whole micro-batches; in between at least what is kept, since shorter
    prompts would fill it, and never less for more."""
    config = configs.load_config("qwen2.5-vl-7b")
    w = Workload(8, 8, 1000, 1000, 40, micro_tokens, overlap=overlap, device="cpu")
    state, totals = _state(config, w), {}
    recomputed = dict(recompute_vision=again == "vision", recompute_layers=again == "layers")
    for keep in range(500, 8501, 500):
        p = plan.plan(config, 4, 4, 2, w, MemoryConfig(keep_tokens=keep, **recomputed))
        planned = {phase: p.peak(phase).total for phase in "123"}
        later = [x.total for x in p.windows if x.name.endswith("of a later prefix")]
        planned |= {"later": max(later)} if later else {}
        walked, totals[keep] = _walk(p, state), planned
        assert ("later" in planned) == ("later" in walked) == (overlap == "prefix")
        if keep % micro_tokens == 0 or keep >= 8000 or overlap == "none":
            assert planned == walked, keep
        else:
            assert all(planned[name] >= walked[name] for name in walked), keep
    for phase in "12":
        peaks = [planned[phase] for planned in totals.values()]
        assert peaks == sorted(peaks)
        if overlap == "prefix" and again == "none":
            assert peaks[0] < peaks[-1]
    everything = plan.plan(config, 4, 4, 2, w, MemoryConfig(**recomputed))
    assert totals[8000] == totals[8500] and {phase: totals[8000][phase] for phase in "123"} == {
        phase: everything.peak(phase).total for phase in "123"
    }


def test_short_prompts_that_are_all_media_fit_into_what_is_planned():
    """As many of them as micro_tokens and keep_tokens allow need no more than planned for long prompts with as many
    visual tokens each."""
    config = configs.load_config("qwen2.5-vl-7b")
    policies = MemoryConfig("recompute"), MemoryConfig(keep_tokens=16384), MemoryConfig("offload"), MemoryConfig()
    for policy, overlap, micro_tokens in product(policies, ("none", "prefix"), (2048, 8192, 2**20)):
        long = Workload(prompt_tokens=4096, visual_tokens=1024, micro_tokens=micro_tokens, overlap=overlap)
        short = replace(long, prompt_tokens=1024)
        windows = [plan.plan(config, 2, 2, 1, w, policy).windows for w in (short, long)]
        assert [x.name for x in windows[0]] == [x.name for x in windows[1]]
        for few, many in zip(*windows, strict=True):
            assert few.total <= many.total, (policy, overlap, micro_tokens, few.name)
    w = Workload(micro_tokens=8192)
    backward = plan.plan(config, 2, 2, 1, w, MemoryConfig("recompute")).windows[-2].bytes["prefix_activations"]
    media = sizes.prefix_bytes(config, replace(w, visual_tokens=4096), 2)
    assert backward == 2 * media + 2 * sizes.boundary_bytes(config, w, 2) // 28


@pytest.mark.parametrize("overlap", ["none", "prefix"])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("again", ["none", "vision", "layers"])
def test_chunks_loaded_ahead_equal_a_walk_through_the_step(overlap, activations, again):
    """They arrive before the last micro-batch, which may be one of several or the only one."""
    config = configs.load_config("qwen2.5-vl-7b")
    recomputed = dict(recompute_vision=again == "vision", recompute_layers=again == "layers")
    names = set()
    for micro_tokens, keep, ahead_gib in product((1000, 4000, 8000), (0, 4000, 8000), (0.0, 1.5, 20.0, 100.0)):
        policy = MemoryConfig(activations, keep_tokens=keep, **recomputed)
        w = Workload(8, 8, 1000, 1000, 40, micro_tokens, overlap=overlap, ahead_gib=ahead_gib, device="cpu")
        p = plan.plan(config, 4, 4, 2, w, policy)
        state = _state(config, w)
        walked = {phase: total for phase, total in _walk(p, state).items() if phase in "123"}
        if micro_tokens <= (keep or 8000):  # otherwise more is planned than is kept
            assert {phase: p.peak(phase).total for phase in "123"} == walked, (micro_tokens, keep)
        assert p.peak("3").bytes["optimizer_state"] == state["workspace"] + state["chunks"]
        assert p.peak("start-up").bytes["optimizer_state"] == state["workspace"] < 3 * 2**26
        held = [x for x in p.windows if x.phase == "2" and "optimizer_state" in x.bytes]
        assert bool(held) == bool(ahead_gib) and {x.bytes["optimizer_state"] for x in held} <= {state["chunks"]}
        names |= {x.name.partition(" of ")[2] for x in held}
        assert not any("optimizer_state" in x.bytes for x in p.windows if x.phase == "1")
    assert names == ({""} if overlap == "none" else {"a later prefix"})


def test_every_policy_makes_some_window_smaller():
    """Figure 8's ablations: each switch, off, costs memory in the phases that its object should have left."""
    config, w = configs.load_config("qwen2.5-vl-32b"), Workload()
    on = plan.plan(config, 8, 8, 4, w, MemoryConfig(activations="recompute"))
    for name, phases in dict(
        state_offload="123", engine_release="23", weight_sharing="123", reference_paging="2"
    ).items():
        off = on.replan(**{name: False})
        grown = [phase for phase in "123" if off.peak(phase).total > on.peak(phase).total]
        assert set(phases) <= set(grown), (name, grown)
    assert on.replan(chunked_optimizer=False).peak("3").bytes["optimizer_state"] == pytest.approx(
        12 * on.peak("3").bytes["gradient"] / 4, rel=1e-6
    )


def test_offloading_needs_room_on_the_host_for_what_waits():
    """Of all groups when prefixes run ahead, else of a micro-batch."""
    config, policy = configs.load_config("qwen2.5-vl-7b"), MemoryConfig(activations="offload")
    ahead = plan.plan(config, 2, 2, 1, Workload(visual_tokens=0, micro_tokens=8192), policy)
    serial = ahead.replan(overlap="none")
    one = plan.OFFLOAD_FACTOR * sizes.prefix_bytes(config, ahead.workload, 2)
    assert ahead.host["offloaded activations"] == pytest.approx(32 * one)
    assert serial.host["offloaded activations"] == pytest.approx(2 * one)


# ---- command line ----------------------------------------------------------------------------------------------------


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "plan.py", *arguments]
    return subprocess.run(command, cwd=Path(plan.__file__).parent, capture_output=True, text=True, timeout=60)


def test_command_line_answers_fast_and_needs_neither_megatron_nor_vllm():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run("--model", "qwen2.5-vl-32b", "--train-tp", "8", "--rollout-tp", "4")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0 and seconds < 10, (
        seconds,
        done.stderr,
    )  # of a core: 3.2; a shared machine takes longer
    for text in (
        "actor: FP32 Adam moments",
        "prefix_activations",
        "Cheapest change: ",
        "largest that fit",
        "host, GiB",
    ):
        assert text in done.stdout
    check = "import sys, settings; sys.exit(any(m.partition('.')[0] in ('megatron', 'vllm') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(plan.__file__).parent).returncode == 0


def test_without_degrees_it_says_how_many_gpus(capsys):
    plan.main(["--model", "qwen2.5-vl-7b", "--hbm-gib", "60"])
    printed = capsys.readouterr().out
    assert "1 GPU of 60 GiB, 5% in reserve: nearest is" in printed and "2 GPUs of 60 GiB are enough" in printed
    assert "\nfits: " in printed


def test_what_is_not_at_its_default_is_as_given(capsys):
    plan.main(
        ["--model", "qwen2.5-vl-7b", "--hbm-gib", "141", "--micro-tokens", "4096", "--memory.keep-tokens", "8192"]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, value in (("micro_tokens", "4096"), ("keep_tokens", "8192")):
        assert [name, value, "as", "given"] in lines
    assert any(line[:2] == ["activations", "keep"] for line in lines)


def test_table_is_markdown(capsys):
    plan.main(["--table"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + sum(len(counts) for counts in settings.COUNTS.values())
    assert all(row.count("|") == 6 for row in rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "qwen9"], "--model qwen9: expected one of tiny, qwen2.5-vl-3b"),
        (["--train-tp", "8", "--rollout-tp", "3"], "--train-tp 8 must be a positive multiple of --rollout-tp 3"),
        (["--train-tp", "3"], "--train-tp 3 does not divide the model's 8 key/value heads"),
        (["--gpus", "6", "--train-tp", "4"], "--train-tp 4: expected a divisor of 6 GPUs"),
        (["--gpus", "16", "--train-tp", "8", "--prompts", "3"], "--prompts 3: expected a multiple of the 2 replicas"),
        (["--rollout-tp", "4"], "--rollout-tp 4: expected --train-tp beside it"),
        (["--train-tp", "8", "--micro-tokens", "0"], "--micro-tokens 0: expected 1 or more"),
        (["--train-tp", "8", "--response-tokens", "0"], "--response-tokens 0: expected 1 or more"),
        (["--train-tp", "8", "--visual-tokens", "9999"], "--visual-tokens 9999: expected 0 to the prompt's 4096"),
        (["--hbm-gib", "0"], "--hbm-gib 0.0: expected above 0"),
        (["--gpus", "-1"], "--gpus -1: expected 0 (automatic) or more"),
        (["--train-tp", "8", "--memory.offload-gib", "-1"], "--memory.offload-gib -1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan.main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    text = capsys.readouterr().out
    for name in [f.name for cls in (plan.Args, Workload) for f in fields(cls)]:
        if name not in ("workload", "memory"):
            flag = name.replace("_", "-")
            assert f"--{flag} " in text or f"--no-{flag} " in text, name

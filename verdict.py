"""Verdict: whether a plan fits, and if not, the cheapest change that makes it fit; the largest budgets that do.

Every answer is found by planning again: a change is named only if the plan with it fits, and the plan without it does
not.

Run:
    python plan.py --model qwen2.5-vl-32b --train-tp 8 --rollout-tp 4      # prints report(): plan, verdict, budgets
To name another change, add it to _changes(), where it belongs by its cost.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from plan import GPUS_PER_HOST, Plan, activations_of, formulas
from sizes import GIB, kv_bytes, passes

RESERVE = 0.05  # share of a GPU that settings.choose() leaves free
FULL_TOKENS = 8192  # below some 8 to 16 thousand tokens at once an H200 waits for the host's launches (measured)


# ---- verdict ---------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Something that may make a plan smaller. make() raises ValueError where it cannot be."""

    text: str
    cost: str
    make: Callable[[Plan], Plan]


class Verdict(NamedTuple):
    """Whether a plan fits; and with the cheapest changes if not (`fixed` is None if none known here is enough)."""

    fits: bool
    text: str
    fixed: Plan | None


def fits(p: Plan, hbm_bytes: float, host_bytes: float = 0) -> bool:
    """Whether no window exceeds a GPU, and no host its memory (0: unlimited)."""
    return not _excess(p, hbm_bytes, host_bytes)


def verdict(p: Plan, hbm_bytes: float, host_bytes: float = 0) -> Verdict:
    """Fits with which margin; or the first object and phase that do not, and the cheapest change, by planning again."""
    if fits(p, hbm_bytes, host_bytes):
        worst, left = p.peak(), hbm_bytes - p.peak_bytes
        tight = f", less than the {RESERVE:.0%} to keep in reserve" if left < RESERVE * hbm_bytes else ""
        where = f"at the peak, phase {worst.phase}, {worst.name}"
        return Verdict(True, f"fits: {left / GIB:.1f} of {hbm_bytes / GIB:.4g} GiB are left {where}{tight}", p)
    reason = f"a host needs {p.host_bytes / GIB:.0f} of {host_bytes / GIB:.0f} GiB, {max(p.host, key=p.host.get)} most"
    if p.peak_bytes > hbm_bytes:
        reason = _first_overflow(p, hbm_bytes)
    if (found := cheapest(p, hbm_bytes, host_bytes)) is None:
        return Verdict(False, f"does not fit: {reason}. No change known here makes it fit", None)
    changes = "; ".join(f"{change.text} ({change.cost})" for change in found[0])
    left = f"{(hbm_bytes - found[1].peak_bytes) / GIB:.1f} GiB to spare"
    return Verdict(False, f"does not fit: {reason}. Cheapest change: {changes}. Then it fits with {left}", found[1])


def _first_overflow(p: Plan, hbm_bytes: float) -> str:
    """Names the object that passes the limit in the first window that does, in order of arrival, temporaries last."""
    window, before = next(w for w in p.windows if w.total > hbm_bytes), 0
    arrivals = iter(sorted(window.bytes.items(), key=lambda item: item[0] == "other"))
    while before + (last := next(arrivals))[1] <= hbm_bytes:
        before += last[1]
    tag, nbytes = last
    where = f"phase {window.phase} ({window.name}) needs {window.total / GIB:.1f} of {hbm_bytes / GIB:.4g} GiB"
    return f"{where}; the first object beyond is {tag}, {nbytes / GIB:.1f} GiB on top of {before / GIB:.1f}"


def _excess(p: Plan | None, hbm_bytes: float, host_bytes: float) -> float:
    """Bytes by which windows and the host exceed their limits, added up; 0 if everything fits."""
    if p is None:
        return math.inf
    host = max(0, p.host_bytes - host_bytes) if host_bytes else 0
    return host + sum(max(0, window.total - hbm_bytes) for window in p.windows)


def cheapest(p: Plan, hbm_bytes: float, host_bytes: float = 0) -> tuple[list[Change], Plan] | None:
    """Changes that together make `p` fit, none of them needless and the dearest as cheap as can be; None if none do."""

    def excess(changes: list[Change]) -> float:
        return _excess(_make(p, changes), hbm_bytes, host_bytes)

    made: list[Change] = []
    for change in _changes(p, hbm_bytes):
        if excess([*made, change]) < excess(made):
            made.append(change)
        if not excess(made):
            break
    else:
        return None
    for change in reversed(made):
        if not excess(fewer := [other for other in made if other is not change]):
            made = fewer
    return made, _make(p, made)


def _make(p: Plan, changes: list[Change]) -> Plan | None:
    try:
        for change in changes:
            p = change.make(p)
    except ValueError:
        return None
    return p


_POLICIES = {
    "chunked_optimizer": "chunks are pipelined",
    "reference_paging": "a copy from the host for each of its two windows",
    "engine_release": "the cache is mapped anew once a step",
    "weight_sharing": "nothing: it saves a copy at each publication",
    "state_offload": "24 B a parameter between host and GPU once a step",
}


def _changes(p: Plan, hbm_bytes: float) -> Iterator[Change]:
    """What can be tried, cheapest first."""
    w, policy, gpus = p.workload, p.policy, "more GPUs"

    def change(text: str, cost: str, **fields) -> Change:
        return Change(text, cost, lambda q: q.replan(**fields))

    for name, cost in _POLICIES.items():
        if not getattr(policy, name):
            yield change(f"without --memory.no-{name.replace('_', '-')}", cost, **{name: True})
    if w.ahead_gib:
        yield change("--optimizer.ahead-gib 0", "the optimizer loads all of its state in phase 3", ahead_gib=0.0)
    if w.chunk_mib > 16:
        yield change("--optimizer.chunk-mib 16", "more and shorter copies", chunk_mib=16.0)
    yield Change("a smaller KV cache", "fewer responses decoded at once", lambda q: _smaller_kv(q, hbm_bytes))
    smaller = [
        change(f"--micro-tokens {tokens}", "smaller matrix products", micro_tokens=tokens)
        for tokens in halves(w.micro_tokens, 1024)[1:]
    ]
    enough = sum(tokens >= FULL_TOKENS for tokens in halves(w.micro_tokens, 1024)[1:])
    yield from smaller[:enough]
    if policy.activations == "keep":
        if w.overlap == "prefix" and not policy.recompute_vision and not policy.recompute_layers:
            text, cost = "--memory.recompute-vision", "a second forward pass of the vision tower"
            yield change(text, cost, recompute_vision=True)
        for tokens in (p.groups // k * w.prompt_tokens for k in (2, 4) if not policy.keep_tokens):
            make = partial(_keep, tokens=tokens)
            yield Change(f"--memory.keep-tokens {tokens}", "the other actor prefixes run after the rollout", make)
        text, cost = "--memory.activations recompute", "a second forward pass of each actor prefix"
        yield change(text, cost, activations="recompute", keep_tokens=0)
    yield from smaller[enough:]
    if not policy.recompute_layers:
        yield change("--memory.recompute-layers", "a second forward pass of each layer", recompute_layers=True)
    for tp in (2 * p.rollout_tp, 4 * p.rollout_tp):
        yield change(f"--rollout-tp {tp}", "more collectives a decoded token", rollout_tp=tp)
    for tp in (2 * p.train_tp, 4 * p.train_tp):
        if tp <= p.world:
            yield change(f"--train-tp {tp}", "more collectives a layer, fewer replicas", train_tp=tp)
    if policy.activations != "offload":
        cost = "activations go to the host and back, and need room there"
        yield change("--memory.activations offload", cost, activations="offload", keep_tokens=0)
    if w.overlap == "prefix":
        yield change("--overlap none", "prefixes no longer run beside decode", overlap="none")
    for factor in (2, 4):
        tp, world = factor * p.train_tp, factor * p.world
        yield change(f"{max(tp, p.world)} GPUs with --train-tp {tp}", gpus, world=max(tp, p.world), train_tp=tp)
        yield change(f"{world} GPUs in {world // p.train_tp} replicas", gpus, world=world)
    for factor in (2, 4, 8):
        prompt, response = w.prompt_tokens // factor, w.response_tokens // factor
        yield change(f"--rollout.max-new-tokens {response}", "longer responses are cut", response_tokens=response)
        less = dict(prompt_tokens=prompt, visual_tokens=min(w.visual_tokens, prompt))
        yield change(f"--data.max-prompt-tokens {prompt}", "longer prompts are dropped", **less)


def _smaller_kv(p: Plan, hbm_bytes: float) -> Plan:
    """With the largest KV cache that leaves its windows inside the limit, at least what one group needs."""
    over = max(w.total for w in p.windows if "rollout_kv" in w.bytes) - hbm_bytes
    target = max(kv_bytes(p.hf_config, p.workload, p.rollout_tp, p.workload.n), p.kv_bytes - max(0, over))
    if target >= p.kv_bytes:
        raise ValueError("the KV cache is not too large, or already the smallest that holds one group")
    return p.replan(kv_cache_gib=target / GIB)


def _keep(p: Plan, tokens: int) -> Plan:
    """With so many prompt tokens kept, if that is a micro-batch or more, but not all that there are."""
    at_once = passes(p.workload, p.policy, p.groups)
    if not at_once.prompt <= tokens < at_once.there:
        raise ValueError(f"--memory.keep-tokens {tokens}: expected {at_once.prompt} to {at_once.there - 1}")
    return p.replan(activations="keep", keep_tokens=tokens)


# ---- largest budgets -------------------------------------------------------------------------------------------------


def budgets(p: Plan, hbm_bytes: float) -> dict[str, float]:
    """Largest prompt, the same if all of it is visual, largest response (tokens) and KV cache (GiB) that fit: each with
    the rest as it is, token budgets with the smallest KV cache that holds one group; 0 where nothing fits."""
    w, most = p.workload, p.hf_config.text_config.max_position_embeddings

    def fit(**fields) -> bool:
        smallest = kv_bytes(p.hf_config, replace(w, **fields), p.rollout_tp, w.n)
        return fits(p.replan(**({"kv_cache_gib": smallest / GIB} | fields)), hbm_bytes)

    return {
        "prompt": largest(lambda x: fit(prompt_tokens=x), max(2, w.visual_tokens), most - w.response_tokens),
        "visual": largest(lambda x: fit(prompt_tokens=x, visual_tokens=x), 2, most - w.response_tokens),
        "response": largest(lambda x: fit(response_tokens=x), 1, most - w.prompt_tokens),
        "kv_gib": largest(lambda x: fit(kv_cache_gib=x / 4), 1, int(4 * hbm_bytes / GIB)) / 4,
    }


def largest(good: Callable[[int], bool], low: int, high: int) -> int:
    """The largest whole number from `low` to `high` for which good() holds, if it holds for one of high, high / 2, …,
    low and from there up to some limit; else 0. It need not hold below: short prompts can be all media."""
    starts = [*halves(high, low), low] if low <= high else []
    if (low := next((x for x in starts if good(x)), 0)) == 0:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def halves(start: int, least: int = 1) -> list[int]:
    """start, start / 2, … down to `least`."""
    return [start, *halves(start // 2, least)] if start // 2 >= least else [start]


# ---- printing --------------------------------------------------------------------------------------------------------


def report(p: Plan, hbm_bytes: float, host_bytes: float = 0) -> str:
    """Objects by phase with their formulas, host memory, verdict and largest budgets."""
    w, peaks = p.workload, [p.peak(phase) for phase in ("start-up", "1", "2", "3")]
    texts = formulas(p)
    tags = [tag for tag in texts if any(window.bytes.get(tag) for window in peaks)]
    lines = [
        f"{p.world} GPUs, train TP {p.train_tp}, rollout TP {p.rollout_tp}, {w.dtype}, --overlap {w.overlap}, "
        f"activations {activations_of(p.policy)}",
        f"{w.prompts} prompts of {w.prompt_tokens} tokens, {w.visual_tokens} visual; {w.n} responses of "
        f"{w.response_tokens}; {w.micro_tokens} tokens at once\n",
        f"GiB a GPU at each peak{'start-up':>10s}" + "".join(f"{f'phase {i}':>9s}" for i in "123"),
    ]
    for tag in tags:
        cells = "".join(f"{window.bytes[tag] / GIB:9.2f}" if window.bytes.get(tag) else f"{'':9s}" for window in peaks)
        lines.append(f"  {tag:21s}{cells}   {texts[tag]}")
    lines.append(f"  {'together':21s}" + "".join(f"{window.total / GIB:9.2f}" for window in peaks))
    lines += ["", "windows: " + ", ".join(f"{x.phase} {x.name} {x.total / GIB:.1f}" for x in p.windows), ""]
    host = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in p.host.items() if nbytes)
    lines.append(f"host, GiB: {sum(p.host.values()) / GIB:.1f} for each GPU ({host});")
    lines.append(f"  {p.host_bytes / GIB:.0f} for a host with {min(p.world, GPUS_PER_HOST)} of them")
    judged = verdict(p, hbm_bytes, host_bytes)
    lines += ["", judged.text]
    if judged.fixed is not None:
        most, after = budgets(judged.fixed, hbm_bytes), "" if judged.fits else " after the change"
        tokens = f"prompt {most['prompt']} tokens ({most['visual']} if all are visual), response {most['response']}"
        lines.append(f"largest that fit{after}, one at a time: {tokens}, KV cache {most['kv_gib']:g} GiB")
    return "\n".join(lines)

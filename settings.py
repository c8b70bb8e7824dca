"""Settings: what train.py uses where its command line says nothing, by planning until something fits.

    world, GPU and host memory, the step's data ─► candidates in order of preference ─► the first whose plan fits
                                                   (what is given stays as it is)        and a reason for each setting

Run:
    python plan.py --model qwen2.5-vl-7b --hbm-gib 141     # choose() for 1, 2, 4 … GPUs, with its reasons
To prefer other settings, edit _kinds() and _candidates(); to choose one more, add it to Settings and PARTS.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import configs
import hardware
from arena import align
from memory import MemoryConfig
from plan import GPUS_PER_HOST, Args, Plan, activations_of, plan
from sizes import GIB, Workload, dims, passes, require
from verdict import FULL_TOKENS, RESERVE, fits, halves, largest, report, verdict

if TYPE_CHECKING:  # train.py is built on this file, and is another module where it is the program
    from train import Config

ADMITTED_TOKENS = 8192  # an engine's prefill waits for the host's launches, however few prompts it has (measured)


# ---- defaults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What train.py uses where its command line says nothing."""

    train_tp: int
    rollout_tp: int
    micro_tokens: int
    activations: str
    keep_tokens: int
    recompute_vision: bool
    recompute_layers: bool
    kv_cache_gib: float
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_mib: float
    offload_gib: float
    plan: Plan
    reasons: dict[str, str]  # field -> one line


PARTS = {  # of train.Config: what of it is chosen
    "": ("train_tp", "rollout_tp", "micro_tokens"),
    "memory": ("activations", "keep_tokens", "recompute_vision", "recompute_layers"),
    "rollout": ("kv_cache_gib", "max_num_seqs", "max_num_batched_tokens"),
    "optimizer": ("chunk_mib",),
}
CHOSEN = tuple(name for names in PARTS.values() for name in names)


def choose(
    hf_config,
    world: int,
    hbm_bytes: float,
    host_bytes: float,
    workload: Workload,
    policy: MemoryConfig | None = None,
    given: dict | None = None,
) -> Settings:
    """Settings whose step leaves RESERVE of each GPU free, and fits into `host_bytes` of a host (0: unlimited).

    Preferred in this order: a small rollout TP, a small train TP, half of the responses or more at once, many tokens at
    once up to FULL_TOKENS, activations kept rather than some of them or none, more responses, more tokens. Layers are
    computed again only where nothing else fits, and activations offloaded only where that does not either. `given`
    ({field of CHOSEN: value}) stays as it is; the same fields of `workload` and `policy` do not count, but for what is
    recomputed. Raises ValueError with a verdict, or naming a given value that cannot be.
    """
    given = dict(given or {})
    assert set(given) <= set(CHOSEN), f"given: expected some of {CHOSEN}, got {tuple(given)}"
    if given.get("train_tp") == 0:  # all GPUs, as for train.py
        given["train_tp"] = world
    for name in ("train_tp", "rollout_tp", "micro_tokens", "max_num_seqs"):
        require(given.get(name, 1) >= 1, name, given.get(name), "1 or more")
    room, nearest, failure = hbm_bytes * (1 - RESERVE), None, ""
    for p in _candidates(hf_config, world, workload, policy or MemoryConfig(), given):
        if isinstance(p, str):
            failure = p
        elif fits(p, room, host_bytes):
            return _settings(p, room, given)
        elif nearest is None or p.peak_bytes < nearest.peak_bytes:
            nearest = p
    if nearest is None:
        raise ValueError(failure)
    degrees = f"train TP {nearest.train_tp}, rollout TP {nearest.rollout_tp}, {activations_of(nearest.policy)}"
    gpus = f"{world} GPU{'s' * (world > 1)} of {hbm_bytes / GIB:.4g} GiB"
    text = verdict(nearest, room, host_bytes).text
    raise ValueError(f"{gpus}, {RESERVE:.0%} in reserve: nearest is {degrees}, which {text}")


def _candidates(hf_config, world: int, workload: Workload, policy: MemoryConfig, given: dict) -> Iterator[Plan | str]:
    """Plans in order of preference that agree with what is given; where the degrees cannot be, why."""
    for train_tp, rollout_tp, kinds, layers in _kinds(world, policy, given):
        groups = max(1, workload.prompts * train_tp // world)
        sequences = halves(min(256, math.ceil(groups * rollout_tp / train_tp) * workload.n), workload.n)
        sequences = [given["max_num_seqs"]] if "max_num_seqs" in given else sequences
        sizes = _micro_tokens(workload) if "micro_tokens" not in given else [given["micro_tokens"]]
        enough = FULL_TOKENS // workload.prompt_tokens * workload.prompt_tokens or FULL_TOKENS  # in whole prompts
        full = [tokens for tokens in sizes if tokens >= enough]  # equally good; of the others the most first
        equal = product((sequences[:2], sequences[2:]), [full, *([x] for x in sizes if x < enough)], kinds)
        for seqs, kind, micro_tokens in (
            (seqs, one, micro_tokens)
            for some, tokens, alike in equal
            for seqs, one in product(some, alike)
            for micro_tokens in (tokens[::-1] if one == "some" else tokens)  # smaller passes leave room for more
        ):
            own = dict(kv_cache_gib=0.0, chunk_mib=64.0)
            own["max_num_batched_tokens"] = max(4096, align(workload.prompt_tokens + seqs))  # beside decode
            own |= {name: given[name] for name in own if name in given}
            step = replace(workload, micro_tokens=micro_tokens, max_num_seqs=seqs, **own)
            keep, tower = given.get("keep_tokens", 0), given.get("recompute_vision", policy.recompute_vision)
            if kind == "some":  # at least a micro-batch, in whole prompts; _settings() finds out how many
                keep = align(max(micro_tokens, step.prompt_tokens), step.prompt_tokens)
                tower = given.get("recompute_vision", not layers)  # takes less room
                if step.overlap == "none" or keep >= groups * step.prompt_tokens:
                    continue  # the same as all
            activations = "keep" if kind == "some" else kind
            recomputed = dict(recompute_vision=tower, recompute_layers=layers)
            residency = replace(policy, activations=activations, keep_tokens=keep, **recomputed)
            try:
                yield plan(hf_config, world, train_tp, rollout_tp, step, residency)
            except ValueError as error:
                yield str(error)


def _kinds(world: int, policy: MemoryConfig, given: dict) -> Iterator[tuple[int, int, list[list[str]], bool]]:
    """Train TP, rollout TP, which activations to try (lists of equally good ones) and whether layers are computed
    again, in order of preference."""
    degrees = [tp for tp in range(1, world + 1) if world % tp == 0]
    trains = [given["train_tp"]] if "train_tp" in given else [tp for tp in degrees if tp <= GPUS_PER_HOST]
    rollouts = [given["rollout_tp"]] if "rollout_tp" in given else degrees
    pairs = [(t, r) for r in rollouts for t in trains if t % r == 0] or [(trains[-1], rollouts[-1])]  # says why not

    def agrees(kind: str) -> bool:
        if kind == "some" and "keep_tokens" in given:
            return False
        activations = "keep" if kind == "some" else kind
        keeps = given.get("keep_tokens") or given.get("recompute_vision")  # neither has an effect otherwise
        return activations == given.get("activations", "keep" if keeps else activations)

    again = given.get("recompute_layers", policy.recompute_layers)  # as given, or where nothing fits without
    rounds = [([["keep"], ["some", "recompute"]], again), ([["offload"]], again)]
    if not again and "recompute_layers" not in given:
        rounds.insert(1, ([["recompute"], ["keep"]], True))  # keeping needs more: only if it is given
        rounds += [([["offload"]], True)] if given.get("activations") == "offload" else []
    for kinds, layers in rounds:
        for train_tp, rollout_tp in pairs:
            yield train_tp, rollout_tp, [[kind for kind in some if agrees(kind)] for some in kinds], layers


def _micro_tokens(w: Workload) -> list[int]:
    """Whole prompts of full length, up to 2 * FULL_TOKENS; then less than one, so that only suffixes take less room."""
    prompts = [k * w.prompt_tokens for k in halves(max(1, 2 * FULL_TOKENS // w.prompt_tokens))]
    return prompts + [tokens for tokens in (4096, 2048) if tokens < w.prompt_tokens]


def _settings(p: Plan, room: float, given: dict) -> Settings:
    """The plan with the KV cache in round figures, as many prompts kept as fit if it keeps some, and the largest chunk
    that is not what needs most; but for what is given."""
    w = p.workload
    if "kv_cache_gib" not in given:
        rounded = p.replan(kv_cache_gib=math.ceil(4 * p.kv_bytes / GIB) / 4)
        p = rounded if fits(rounded, room) else p.replan(kv_cache_gib=p.kv_bytes / GIB)
    if "max_num_batched_tokens" not in given:
        several = p.replan(max_num_batched_tokens=max(ADMITTED_TOKENS, w.max_num_batched_tokens))
        p = several if fits(several, room) else p
    if p.policy.keep_tokens and "keep_tokens" not in given:
        fixed = p.policy.recompute_layers or "recompute_vision" in given
        p = _keeping_most(p, room, [p.policy.recompute_vision] if fixed else [False, True])
    if "chunk_mib" not in given:
        larger = (p.replan(chunk_mib=chunk) for chunk in (512.0, 256.0, 128.0))
        p = next((q for q in larger if q.peak().phase in ("1", "2")), p)
    offload = math.ceil(p.host["offloaded activations"] / GIB)
    reasons = _reasons(p) | dict.fromkeys(given, "as given")
    reasons |= {"offload_gib": "what all groups of a replica save"} if offload else {}
    degrees, w = {"train_tp": p.train_tp, "rollout_tp": p.rollout_tp}, p.workload
    chosen = degrees | {name: getattr(w if hasattr(w, name) else p.policy, name) for name in CHOSEN[2:]}
    return Settings(**chosen, offload_gib=offload, plan=p, reasons=reasons)


def _keeping_most(p: Plan, room: float, towers: list[bool]) -> Plan:
    """With as many whole prompts kept as fit, all of them perhaps; the vision tower as one of `towers` says,
    whichever spares the time after the rollout more matrix products. `p` fits."""
    vision, w, groups = p.hf_config.vision_config, p.workload, p.groups
    d, wide = dims(p.hf_config, 1), vision.hidden_size
    language = w.prompt_tokens * d.layers * d.hidden * (2 * d.query + 2 * d.kv + 3 * d.inner)
    tower = 4 * w.visual_tokens * vision.depth * wide * (4 * wide + 3 * vision.intermediate_size)
    at_once, found = max(1, w.micro_tokens // w.prompt_tokens), []
    for again in towers:

        def kept(k: int, again: bool = again) -> Plan:
            return p.replan(keep_tokens=k * w.prompt_tokens if k < groups else 0, recompute_vision=again)

        most = largest(lambda k, kept=kept: fits(kept(k), room), p.policy.keep_tokens // w.prompt_tokens, groups)
        whole = most if most == groups else most // at_once * at_once  # micro-batches
        found += [(whole * (language + (0 if again else tower)), kept(most))] if most else []
    return max(found, key=lambda pair: pair[0])[1]


def _reasons(p: Plan) -> dict[str, str]:
    """A line for each setting."""
    w, policy, groups = p.workload, p.policy, p.groups
    at_once = passes(w, policy, groups)
    activations = dict(
        keep="what the prefixes save fits beside decode: nothing is computed or copied twice",
        recompute="kept ones do not fit; a second forward pass takes less time than copies to the host and back",
        offload="neither kept nor recomputed ones fit at any degree",
    )[policy.activations]
    kept = dict(keep="all of them").get(policy.activations, "none of them is kept")
    if policy.keep_tokens:
        activations = "as many as fit beside decode; the others are computed after it"
        kept = f"{policy.keep_tokens / w.prompt_tokens:.3g} of the {groups} prompts of a replica fit"
    tower = "what it saves fits" if w.overlap == "prefix" else "no prefix waits beside decode"
    if policy.recompute_vision:
        tower = "more prefixes can be kept: that spares more than a second pass of the tower costs"
    layers = "what the layers of one micro-batch save fits"
    if policy.recompute_layers:
        layers = "as given, or nothing fits without: one more forward pass, layer by layer, in each backward"
    most = f"{at_once.prompt / w.prompt_tokens:.3g} of {groups} prompts, or {at_once.response} response tokens"
    return dict(
        train_tp=f"the smallest that fits: {p.world // p.train_tp} replica(s), peak {p.peak_bytes / GIB:.1f} GiB a GPU",
        rollout_tp=f"the smallest that fits: {p.world // p.rollout_tp} engine(s), fewest collectives a decoded token",
        micro_tokens=f"{most}, at once: some {FULL_TOKENS} keep a GPU busy",
        activations=activations,
        keep_tokens=kept,
        recompute_vision=tower,
        recompute_layers=layers,
        kv_cache_gib=f"{w.max_num_seqs} responses at full length, a group's prompt once",
        max_num_seqs="all responses of an engine at once, up to 256, or as many as the KV cache has room for",
        max_num_batched_tokens=f"whole prompts in one engine step: {w.max_num_batched_tokens // w.prompt_tokens}",
        chunk_mib="the largest up to 512 that leaves the peak to phase 1 or 2",
    )


# ---- train.py's configuration ----------------------------------------------------------------------------------------


def planned_hbm_bytes(config: "Config") -> int:
    """Size to plan for: the limit given, this host's GPUs, or in a dry run without either 80 GiB; 0 if unknown."""
    return int(config.memory.hbm_limit_gib * 2**30) or hardware.gpu_bytes() or (80 * 2**30 if config.dry_run else 0)


def workload(config: "Config") -> Workload:
    """The largest step that the configuration allows, as the planner wants it."""
    prompt, most = config.data.max_prompt_tokens, config.data.max_frames // 2 * (config.data.max_pixels // 28**2)
    return Workload(
        prompts=config.prompts,
        n=config.rollout.n,
        prompt_tokens=prompt,
        visual_tokens=min(prompt, most),
        response_tokens=config.rollout.max_new_tokens,
        micro_tokens=config.micro_tokens,
        slice_tokens=config.data.max_pixels // 28**2,
        kv_cache_gib=config.rollout.kv_cache_gib,
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        chunk_mib=config.optimizer.chunk_mib,
        ahead_gib=config.optimizer.ahead_gib,
        dtype=config.dtype,
        qkv=config.qkv,
        overlap=config.overlap,
        reference=config.algo.kl_coef > 0,
        device="cuda" if hardware.gpu_bytes() or config.dry_run else "cpu",
    )


def given(config: "Config", flags: set[str]) -> dict:
    """Of what is chosen, the values of the fields that the command line names (train.named_flags)."""
    found = {}
    for part, names in PARTS.items():
        owner, prefix = (getattr(config, part), f"{part}.") if part else (config, "")
        found |= {name: getattr(owner, name) for name in names if prefix + name.replace("_", "-") in flags}
    return found


def applied(config: "Config", chosen: Settings) -> "Config":
    """`config` with what is chosen; flags on the command line still override it."""
    own = {part: {name: getattr(chosen, name) for name in names} for part, names in PARTS.items()}
    own["memory"] |= dict(offload_gib=chosen.offload_gib or config.memory.offload_gib)
    return replace(config, **own.pop(""), **{part: replace(getattr(config, part), **own[part]) for part in own})


# ---- printing --------------------------------------------------------------------------------------------------------


def choice(settings: Settings) -> str:
    """Every chosen setting with its reason, a line each."""
    return "\n".join(f"  {k:24s}{getattr(settings, k)!s:>10s}   {reason}" for k, reason in settings.reasons.items())


def enough(args: Args, hf_config, hbm_bytes: float) -> Plan:
    """Print and plan what choose() says for args.gpus, or for the fewest that are enough, with those of its settings as
    given that are not at their defaults. Raises ValueError if none are."""
    counts = [args.gpus] if args.gpus else [1, 2, 4, 8, 16, 32]
    owners = (args.workload, Workload()), (args.memory, MemoryConfig())  # what is not the default is taken as given
    settings = {name: pair for pair in owners for name in CHOSEN if hasattr(pair[0], name)}
    given = {k: getattr(own, k) for k, (own, usual) in settings.items() if getattr(own, k) != getattr(usual, k)}
    for world in counts:
        try:
            settings = choose(hf_config, world, hbm_bytes, args.host_gib * GIB, args.workload, args.memory, given)
        except ValueError as error:
            if world == counts[-1]:
                raise
            print(str(error).partition(". Cheapest")[0])
            continue
        print(f"{args.model}: {world} GPUs of {hbm_bytes / GIB:g} GiB are enough\n{choice(settings)}\n")
        return settings.plan
    raise AssertionError("unreachable: the last count returns or raises")


def explain(config: "Config", world: int) -> str:
    """Every object by phase, and whether it fits, for --dry-run."""
    world = config.gpus or world
    degrees = world, config.tp(world), config.rollout_tp
    planned = plan(configs.load_config(config.model), *degrees, workload(config), config.memory)
    return f"{config.model}: {report(planned, planned_hbm_bytes(config))}\n"


COUNTS = {"qwen2.5-vl-3b": (1, 2, 4), "qwen2.5-vl-7b": (1, 2, 4, 8), "qwen2.5-vl-32b": (4, 8, 16, 32)}
COUNTS["qwen2.5-vl-72b"] = (8, 16, 32)


def markdown(w: Workload, policy: MemoryConfig) -> Iterator[str]:
    """Rows of the README's table: each model and GPU count on 80, 96 and 141 GiB GPUs, hosts of at most 2 TiB."""
    yield "| model | GPUs | 80 GiB | 96 GiB | 141 GiB |\n|---|---|---|---|---|"
    for model, counts in COUNTS.items():
        for world in counts:
            cells = [_cell(configs.load_config(model), world, gib * GIB, w, policy) for gib in (80, 96, 141)]
            yield f"| {model} | {world} | {' | '.join(cells)} |"


def _cell(hf_config, world: int, hbm_bytes: float, w: Workload, policy: MemoryConfig) -> str:
    try:
        s = choose(hf_config, world, hbm_bytes, 2048 * GIB, w, policy)
    except ValueError:
        return "no"
    degrees = f"{s.train_tp} / {s.rollout_tp}, {activations_of(s.plan.policy)}"
    return f"{degrees}: {s.plan.peak_bytes / GIB:.0f}, host {s.plan.host_bytes / GIB:.0f}"

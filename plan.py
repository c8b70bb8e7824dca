"""Plan: how many GPUs a model needs, whether it fits on them, and if not, the cheapest change that makes it fit.

    sizes.py: bytes of each object ─► windows, in the order of a step: what lives at once in each
      phase 1  [reference prefix][actor prefix]
      phase 2  [reference suffix][actor suffix][prefix backward]
      phase 3  [optimizer]
                 │
                 ▼ peak of each phase, host memory
      verdict.py: whether it fits, cheapest change, largest budgets ─► settings.py: defaults for train.py

Weights are exact, activations are formulas that tests compare with real passes on a CPU, temporaries are derived: see
sizes.py. The README has runs at 3B and 7B beside their plans. What the CUDA runtime and the engine's hold are stated
constants. verdict.RESERVE stands for fragmentation and the rest.

Run (no GPU, no weights, under 5 s):
    python plan.py --model qwen2.5-vl-32b --train-tp 8 --rollout-tp 4      # the paper's case, with its Table 1
    python plan.py --model qwen2.5-vl-7b --hbm-gib 141                     # how many GPUs, and with which settings
    python plan.py --table                                                 # every model on 80, 96 and 141 GiB
Left out on purpose: time (bench.py measures it), pipeline and context parallelism, disaggregated placement.
To change what an object costs, edit its function in sizes.py; to change when it lives, edit _windows().
"""

import gc

if __name__ == "__main__":
    gc.disable()  # what imports make stays, and searching it for garbage took 1.7 of 4.5 s (measured)

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import tyro

import configs
import optimizer
from memory import MemoryConfig
from sizes import (
    GIB,
    Held,
    Workload,
    boundary_bytes,
    dims,
    engine_step_bytes,
    held_weights,
    kv_bytes,
    kv_token_bytes,
    layer_bytes,
    passes,
    prefix_again_bytes,
    prefix_bytes,
    prefix_work,
    require,
    suffix_again_token_bytes,
    suffix_token_bytes,
    suffix_work,
    vision_bytes,
    visual_share,
)

GPUS_PER_HOST = 8
# GPU, measured on H200s at 3B and 7B: both processes' contexts with the trainer's cuBLAS, what collectives add (TP 2),
# what an engine holds between rollouts.
TRAINER_RUNTIME_GIB, COLLECTIVES_GIB, ENGINE_RUNTIME_GIB = 3.0, 1.2, 0.7
# Host: measured on a CPU host, engine 3 GiB, trainer 0.8 after its imports; the trainer's with room for CUDA.
ENGINE_HOST_GIB, TRAINER_HOST_GIB = 3.0, 2.0
# What two operations save is copied to the host twice (assumed; 1.09 to 1.16 when an MLP kept more).
OFFLOAD_FACTOR = 1.2


# ---- what is planned -------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A stretch of a step in which the same objects live: their bytes by tag, in order of arrival."""

    phase: str
    name: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Plan:
    """What one GPU and its share of the host hold in a step of these settings."""

    hf_config: object
    world: int
    train_tp: int
    rollout_tp: int
    workload: Workload
    policy: MemoryConfig
    windows: list[Window]
    host: dict[str, int]  # bytes for each GPU
    kv_bytes: int  # of the engine's KV cache

    @property
    def groups(self) -> int:
        """Prompts of one replica."""
        return self.workload.prompts * self.train_tp // self.world

    def peak(self, phase: str | None = None) -> Window:
        """The fullest window of a phase, or of all."""
        return max((w for w in self.windows if phase in (None, w.phase)), key=lambda w: w.total)

    @property
    def peak_bytes(self) -> int:
        return self.peak().total

    @property
    def host_bytes(self) -> int:
        """Of one host with its GPUs (GPUS_PER_HOST of them, or all if there are fewer)."""
        return sum(self.host.values()) * min(self.world, GPUS_PER_HOST)

    def replan(self, **changes) -> "Plan":
        """The same with other degrees, or other fields of the workload or of the memory policy."""
        degrees = {k: changes.pop(k, getattr(self, k)) for k in ("world", "train_tp", "rollout_tp")}
        policy = replace(self.policy, **{k: changes.pop(k) for k in list(changes) if hasattr(self.policy, k)})
        return plan(self.hf_config, **degrees, workload=replace(self.workload, **changes), policy=policy)


def plan(hf_config, world: int, train_tp: int, rollout_tp: int, workload: Workload, policy: MemoryConfig) -> Plan:
    """Bytes of every object in every window of a step. Raises ValueError naming the field where something cannot be."""
    workload.validate()
    policy.validate()
    require(train_tp > 0 and world > 0 and world % train_tp == 0, "train_tp", train_tp, f"a divisor of {world} GPUs")
    chunks = policy.state_offload and policy.chunked_optimizer
    require(chunks or not workload.ahead_gib, "ahead_gib", workload.ahead_gib, "0: no chunks come from the host")
    replicas = world // train_tp
    require(workload.prompts % replicas == 0, "prompts", workload.prompts, f"a multiple of the {replicas} replicas")
    held, groups = held_weights(hf_config, train_tp, rollout_tp, workload), workload.prompts // replicas
    sizes = _sizes(hf_config, train_tp, rollout_tp, workload, policy, held, groups)
    host = _host(sizes, workload, policy, rollout_tp)
    windows = list(_windows(sizes, workload, policy))
    settings = hf_config, world, train_tp, rollout_tp, workload, policy
    return Plan(*settings, windows, host, sizes["rollout_kv"])


# ---- objects, and when they live -------------------------------------------------------------------------------------


def _sizes(hf_config, train_tp: int, rollout_tp: int, w: Workload, policy: MemoryConfig, held: Held, groups: int):
    """{object: bytes}, of all prompts of a replica whose prefixes wait, or `…_mb` of one micro-batch, `…_kept` of those
    whose activations are kept; `suffix…` of one pass; `…_work` are temporaries."""
    d, gpu, at_once = dims(hf_config, train_tp), w.device == "cuda", passes(w, policy, groups)
    model, again = (hf_config, at_once.batch, train_tp), policy.recompute_layers
    boundary, prefix = boundary_bytes(*model), prefix_bytes(*model, again)
    every = prefix_bytes(hf_config, w, train_tp, again) if w.overlap == "prefix" else prefix
    config, vision = optimizer.OptimizerConfig(chunk_mib=w.chunk_mib, ahead_gib=w.ahead_gib), hf_config.vision_config
    patches = 4 * visual_share(at_once.batch, train_tp)
    layer = (w.prompt_tokens - 1) * layer_bytes(d, w), patches * vision_bytes(hf_config, w) // vision.depth
    responses = min(w.max_num_seqs, math.ceil(groups * rollout_tp / train_tp) * w.n)
    tower_again = policy.recompute_vision and w.overlap == "prefix"
    kept = prefix_bytes(hf_config, at_once.waiting, train_tp, again, tower_again)

    def prompts(one: int, tokens: int) -> int:
        """Bytes of this many prompt tokens, from those of one prompt."""
        return one * tokens // w.prompt_tokens

    return {
        "layers": d.layers,
        "snapshot": held.snapshot + held.fused,
        "engine_weights": held.snapshot,
        "engine_other": gpu * int(ENGINE_RUNTIME_GIB * GIB),
        "engine_step": gpu * engine_step_bytes(hf_config, w, rollout_tp),
        "other": gpu * int((TRAINER_RUNTIME_GIB + COLLECTIVES_GIB * (train_tp > 1)) * GIB),
        "rollout_kv": int(w.kv_cache_gib * GIB) or kv_bytes(hf_config, w, rollout_tp, responses),
        "reference": w.itemsize * held.numel,
        "gradient": 4 * held.numel,
        "state": 12 * held.numel,
        "workspace": optimizer.workspace_bytes(config, 0 if policy.chunked_optimizer else held.numel),
        "ahead": optimizer.ahead_bytes(config, held.numel) if w.ahead_gib else 0,
        "boundary": prompts(boundary, at_once.there),
        "boundary_kept": prompts(boundary, at_once.kept),
        "boundary_mb": prompts(boundary, at_once.prompt),
        "prefix": prompts(every, at_once.there),
        "prefix_kept": prompts(kept, at_once.kept),
        "prefix_mb": prompts(prefix, at_once.prompt),
        "prefix_layer": prompts(max(layer), at_once.prompt),
        "prefix_again": prompts(prefix_again_bytes(*model), at_once.prompt) if again else 0,
        "suffix": at_once.response * suffix_token_bytes(*model, again),
        "suffix_again": at_once.response * suffix_again_token_bytes(*model),
        "suffix_work": gpu * at_once.response * suffix_work(*model),
        "logprobs": groups * w.n * w.response_tokens * (13 + 4 * w.reference),
        "prefix_work": gpu * prompts(prefix_work(*model), at_once.prompt),
        "logits": gpu * at_once.response * d.vocab * w.itemsize,  # where autograd does not keep them
        "boundary_work": gpu * prompts(boundary, at_once.prompt),  # its gradients
        "parameter_work": gpu * w.itemsize * held.largest,  # the gradient that is on its way into the buffer
    }


def _windows(s: dict, w: Workload, policy: MemoryConfig) -> Iterator[Window]:
    """The windows of a step, each with what lives in it: memory.CONTRACT with sizes."""
    ahead, kind = w.overlap == "prefix", policy.activations  # ahead: prefixes wait for their suffixes beside decode
    # Kept keys and values are among the saved tensors, but for the last layer's, and count as boundary. Where layers
    # keep only their input none are; then a recomputed prefix has all of them as outputs, beside the boundary.
    held_twice, anew = (0, s["layers"]) if policy.recompute_layers else (s["layers"] - 1, 1)
    waiting, own = (
        s[f"prefix_{which}"] - s[f"boundary_{which}"] * held_twice // s["layers"] if kind == "keep" else 0
        for which in ("kept", "mb")
    )
    again = s["prefix_mb"] + s["boundary_mb"] * anew // s["layers"]  # with keys and values that were computed anew
    always = {name: s[name] for name in ("snapshot", "engine_other", "other")}
    kept = {"engine_weights": policy.weight_sharing, "rollout_kv": policy.engine_release}
    kept["reference"] = policy.reference_paging or not w.reference
    always |= {name: s[name] for name, leaves in kept.items() if not leaves}
    always["engine_other"] += 0 if policy.engine_release else s["engine_step"]
    always |= {} if policy.state_offload else {"optimizer_state": s["state"]}

    def window(phase: str, name: str, work: int = 0, **more: int) -> Window:
        if "optimizer_state" in more:
            more["optimizer_state"] += always.get("optimizer_state", 0)
        held = always | more
        return Window(phase, name, held | {"other": held.pop("other") + work})

    def training(base: dict[str, int], saved: int, when: str = "") -> Iterator[Window]:
        """Suffixes and backward of a micro-batch, beside prefixes that keep `saved` bytes in all."""
        # The suffixes' backward leaves gradients at the boundary, where the prefix's starts from them.
        work, more = s["boundary_work"] + s["parameter_work"], {"suffix_activations": s["suffix"]}
        yield window("2", f"actor suffix{when}", work, **base, prefix_activations=saved, **more)
        if policy.recompute_layers:  # otherwise what a backward pass frees is more than what it computes
            more = {"suffix_activations": s["suffix_again"]}
            yield window(
                "2", f"suffix backward{when}", work + s["suffix_work"], **base, prefix_activations=saved, **more
            )
        consumed = {"keep": saved, "offload": s["prefix_layer"], "recompute": again}[kind]  # offloaded: layer by layer
        consumed += 0 if kind == "offload" else s["prefix_again"]
        work += s["prefix_work"]
        yield window("2", f"prefix backward{when}", work, **base, prefix_activations=consumed)

    kv, actor = {"rollout_kv": s["rollout_kv"]}, {"actor_boundary": s["boundary_kept"]}
    kv["engine_other"] = s["engine_other"] + s["engine_step"]
    frozen = {"reference_boundary": s["boundary"]} if w.reference else {}
    reference, tokens, gradient = ({name: s[name]} for name in ("reference", "logprobs", "gradient"))
    update, base = gradient | {"optimizer_state": s["workspace"]}, tokens | gradient
    loaded = {"optimizer_state": s["ahead"]} if s["ahead"] else {}  # from the last micro-batches of phase 2 on
    produced = s["prefix_mb"] if kind == "offload" else waiting  # a GPU saves faster than copies leave it
    yield window("start-up", "engine and optimizer start", **update)
    if not ahead:
        yield window("1", "rollout", **kv)
    if ahead and w.reference:
        yield window("1", "reference prefix", s["prefix_work"], **kv, **reference, **frozen)
    if ahead:
        yield window("1", "actor prefix", s["prefix_work"], **kv, **frozen, **actor, prefix_activations=produced)
    if w.reference:
        rest = actor | {"prefix_activations": waiting} if ahead else {}
        work = max(s["logits"], 0 if ahead else s["prefix_work"])
        yield window("2", "reference suffix", work, **rest, **frozen, **tokens, **reference)
    if ahead:
        yield from training(base | actor, waiting)
    base |= loaded | {"actor_boundary": s["boundary_mb"]}
    # Micro-batch by micro-batch, once those that waited are gone: any prefix may come after a short rollout.
    when, saved = " of a later prefix" * ahead, s["prefix_mb"] if kind == "offload" else own
    yield window("2", f"actor prefix{when}", s["prefix_work"], **base, prefix_activations=saved)
    yield from training(base, own, when)
    yield window("3", "optimizer", **gradient, optimizer_state=s["workspace"] + s["ahead"])


def engine_host_bytes(rollout_tp: int) -> int:
    """Host memory of a GPU's share of its engine's processes: a worker each, and above TP 1 one that drives them."""
    return int(ENGINE_HOST_GIB * GIB * (1 + (1 / rollout_tp if rollout_tp > 1 else 0)))


def _host(s: dict, w: Workload, policy: MemoryConfig, rollout_tp: int) -> dict[str, int]:
    """Host memory for each GPU: the pinned pool, and processes at the constants above."""
    return {
        "FP32 master weights and moments": s["state"] if policy.state_offload else 0,
        "reference weights": s["reference"] if w.reference else 0,
        "offloaded activations": int(OFFLOAD_FACTOR * s["prefix"]) if policy.activations == "offload" else 0,
        "trainer and engine processes": int(TRAINER_HOST_GIB * GIB) + engine_host_bytes(rollout_tp),
    }


def activations_of(policy: MemoryConfig) -> str:
    return _kept(policy) + " by layer" * policy.recompute_layers


def _kept(policy: MemoryConfig) -> str:
    some = policy.activations == "keep" and policy.keep_tokens
    return policy.activations + f" {policy.keep_tokens} tokens" * bool(some)


def formulas(p: Plan) -> dict[str, str]:
    """How each object's bytes come about, {tag: text}."""
    hf_config, train_tp, rollout_tp, w, policy, groups = (
        p.hf_config,
        p.train_tp,
        p.rollout_tp,
        p.workload,
        p.policy,
        p.groups,
    )
    held = held_weights(hf_config, train_tp, rollout_tp, w)
    d, b, tokens = dims(hf_config, train_tp), w.itemsize, w.prompt_tokens - 1
    shard = f"{held.numel / 1e9:.3f} B parameters of a training shard"
    again = policy.recompute_layers
    a_layer, kept = (b * d.hidden, ", a layer at a time again") if again else (layer_bytes(d, w), "")
    tower_again = policy.recompute_vision and policy.activations == "keep" and w.overlap == "prefix"
    patch, at_once = vision_bytes(hf_config, w, again or tower_again), passes(w, policy, groups)
    patches = 4 * visual_share(at_once.waiting if policy.activations == "keep" else at_once.batch, train_tp)
    prefix = f"{a_layer} B a token and layer x {d.layers - 1} x {tokens} + {patch} B a patch x {patches}"
    state = "" if policy.state_offload else f"12 B x {shard}, always, and "
    boundary = f"2 x {d.layers} layers x {d.kv // d.head} heads x {d.head} x {b} B x {tokens} tokens x"
    there, waiting = (f"{n / w.prompt_tokens:.4g} prompts" for n in (at_once.there, at_once.kept))
    fused = f" + {held.fused / GIB:.2f} GiB QKV in the trainer's order" if held.fused else ""
    kv = f"{kv_token_bytes(hf_config, w, rollout_tp) / 1024:g} KiB a token"
    chunk = optimizer.OptimizerConfig(chunk_mib=w.chunk_mib, ahead_gib=w.ahead_gib)
    ahead = optimizer.ahead_chunks(chunk, held.numel) if w.ahead_gib else 0
    chunks = f"3 x {w.chunk_mib:g} MiB" + f", and {ahead} more from the last micro-batches of phase 2 on" * bool(ahead)
    return {
        "snapshot": f"{b} B x {held.snapshot / b / 1e9:.3f} B parameters of a rollout shard{fused}",
        "engine_weights": f"{b} B x {held.snapshot / b / 1e9:.3f} B: the engine's own copy",
        "engine_other": f"{ENGINE_RUNTIME_GIB:g} GiB + in a rollout a step of {w.max_num_batched_tokens} tokens",
        "other": "CUDA and collectives of both processes + the window's temporaries",
        "rollout_kv": f"{kv}; {'as given' if w.kv_cache_gib else f'up to {w.max_num_seqs} responses at full length'}",
        "actor_boundary": f"{boundary} {waiting}",
        "reference_boundary": f"{boundary} {there}",
        "reference": f"{b} B x {shard}",
        "prefix_activations": f"{prefix}, a prompt; {_kept(policy)}{kept}",
        "suffix_activations": f"({a_layer} B x {d.layers} layers + {b * d.vocab} B of logits) a token x "
        f"{at_once.response} a pass{kept}",
        "logprobs": f"{13 + 4 * w.reference} B x {groups * w.n * w.response_tokens} response tokens",
        "gradient": f"4 B x {shard}",
        "optimizer_state": state + (chunks if policy.chunked_optimizer else f"12 B x {shard}"),
    }


# ---- Table 1 ---------------------------------------------------------------------------------------------------------

NOMINAL = 32.5e9  # parameters with which the paper's weight rows come out


def table1(hf_config, w: Workload) -> list[tuple[str, float, float | None, float, str]]:
    """Rollplex, Table 1 (everything resident at once, train TP 8, rollout TP 4): component, GiB a GPU from the exact
    tables, from NOMINAL parameters (None: not a function of them), the paper's, and how."""
    held, nominal, token = held_weights(hf_config, 8, 4, w), NOMINAL / 8, kv_token_bytes(hf_config, w, 4)
    prefix, boundary = prefix_bytes(hf_config, w, 8), 2 * w.prompts * w.prompt_tokens * kv_token_bytes(hf_config, w, 8)
    rows = [
        ("actor: BF16 weights", 2 * held.numel, 2 * nominal, 7.6, "2 B x parameters / 8"),
        ("actor: FP32 gradient buffer", 4 * held.numel, 4 * nominal, 15.1, "4 B x parameters / 8"),
        ("actor: FP32 master weights", 4 * held.numel, 4 * nominal, 15.1, "4 B x parameters / 8"),
        ("actor: FP32 Adam moments", 8 * held.numel, 8 * nominal, 30.3, "8 B x parameters / 8"),
        ("actor: activations", prefix, None, 28.3, f"a prompt of {w.prompt_tokens}, {w.visual_tokens} visual; see 1"),
        ("actor: preserved prefix KV", boundary, None, 16.0, f"{w.prompts} prompts in both roles; see 2"),
        ("reference: BF16 weights", 2 * held.numel, 2 * nominal, 7.6, "2 B x parameters / 8"),
        ("rollout: BF16 weights", held.snapshot, 4 * nominal, 15.1, "2 B x parameters / 4"),
        ("rollout: KV cache", 29 * GIB, None, 29.0, f"{29 * GIB // token} tokens of {token // 1024} KiB; see 3"),
        ("rollout: runtime buffers", engine_step_bytes(hf_config, w, 4), None, 3.0, "the paper: 2 to 4"),
    ]
    table = [(name, a / GIB, b and b / GIB, paper, how) for name, a, b, paper, how in rows]
    return [*table, ("total", sum(row[1] for row in table), None, 165.0, "see 4")]


_NOTES = """
exact: the tables of weights.py; the vision tower is whole on every GPU, which 32.5 B / 8 leaves out. The other rows:
1 not determinable: neither the tokens of its microbatch nor what it recomputes are given. 28.3 GiB are what our model
  saves for {tokens:.0f} tokens of text; a visual token costs {visual:.1f} MiB more on the rank that encodes it.
2 inferred: 32 KiB a token at TP 8 x 8192 tokens x 32 prompts x 2 roles = 16.0 GiB, so the whole batch of §4.1 on one
  replica (on 32 GPUs each of four replicas has a quarter of it).
3 not determinable: {sequences:.0f} sequences of 10k tokens; or, with gpu_memory_utilization 0.6, what 15.1 GiB of
  weights and 3.9 of buffers leave of 0.6 x 80.
4 its rows add up to 164.1 without the runtime buffers, 166.1 to 168.1 with them.
"""


def _print_table1(hf_config, w: Workload) -> None:
    w = replace(w, prompts=32, prompt_tokens=8192, response_tokens=2048)
    print(f"Table 1, naive overlap, GiB a GPU{'':4s}{'exact':>8s}{'32.5 B':>8s}{'paper':>8s}")
    for name, exact, nominal, paper, how in table1(hf_config, w):
        print(f"  {name:35s}{exact:8.1f}{f'{nominal:.1f}' if nominal else '':>8s}{paper:8.1f}   {how}")
    text = prefix_bytes(hf_config, replace(w, visual_tokens=0), 8) / (w.prompt_tokens - 1)
    sequences = 29 * GIB / kv_token_bytes(hf_config, w, 4) / 10240
    visual = 4 * vision_bytes(hf_config, w) / 2**20
    print(_NOTES.format(tokens=28.3 * GIB / text, visual=visual, sequences=sequences))


# ---- command line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    """How many GPUs does a model need, will it fit, and if not, what is the cheapest change?"""

    model: str = "qwen2.5-vl-32b"
    """tiny, qwen2.5-vl-3b, -7b, -32b, -72b, or a Hugging Face directory of a Qwen2.5-VL model."""
    gpus: int = 0
    """GPUs altogether. 0: as many as train_tp; if that is 0 too, the fewest that are enough."""
    train_tp: int = 0
    """Tensor-parallel degree of training. 0: chosen, with every setting that train.py would choose."""
    rollout_tp: int = 0
    """Tensor-parallel degree of each engine; divides train_tp. 0 with a train_tp: the same."""
    hbm_gib: float = 80.0
    """Memory of a GPU, GiB; --memory.hbm-limit-gib counts instead if it is given."""
    host_gib: float = 0.0
    """Memory of a host with up to 8 GPUs, GiB. 0: not checked."""
    table: bool = False
    """Print only the table of models, GPU counts and GPU sizes, as Markdown."""
    table1: bool = False
    """Also print the paper's Table 1 (always for qwen2.5-vl-32b at train TP 8 and rollout TP 4)."""
    workload: Annotated[Workload, tyro.conf.arg(name="")] = field(default_factory=Workload)
    """A step"""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Residency, as train.py's"""


def run(args: Args) -> None:
    """Print what the arguments ask for. Raises ValueError naming the field where something cannot be."""
    from settings import enough, markdown  # here, since what decides is built on this file
    from verdict import report

    if args.table:
        for row in markdown(args.workload, args.memory):
            print(row, flush=True)
        return
    hf_config, hbm_bytes = configs.load_config(args.model), (args.memory.hbm_limit_gib or args.hbm_gib) * GIB
    for name in ("gpus", "train_tp", "rollout_tp", "host_gib"):
        require(getattr(args, name) >= 0, name, getattr(args, name), "0 (automatic) or more")
    require(hbm_bytes > 0, "hbm_gib", args.hbm_gib, "above 0")
    require(args.train_tp > 0 or not args.rollout_tp, "rollout_tp", args.rollout_tp, "--train-tp beside it")
    degrees = args.gpus or args.train_tp, args.train_tp, args.rollout_tp or args.train_tp
    if args.table1 or (args.model == "qwen2.5-vl-32b" and degrees[1:] == (8, 4)):
        _print_table1(hf_config, args.workload)
    if args.train_tp:
        planned = plan(hf_config, *degrees, args.workload, args.memory)
    else:
        planned = enough(args, hf_config, hbm_bytes)
    print(f"{args.model}: {report(planned, hbm_bytes, args.host_gib * GIB)}")


def main(argv: list[str] | None = None) -> None:
    """The command line; bad input is one line and exit status 2."""
    about = __doc__.split("\n\n")[0]
    try:
        run(tyro.cli(Args, args=argv, description=about))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    import plan  # so that a class has one identity here and where verdict.py and settings.py import it

    gc.freeze()
    gc.enable()
    plan.main()

"""Plan: how many GPUs a model needs, whether it fits on them, and if not, the cheapest change that makes it fit.

    weights.py's tensor table ─► bytes of weights, gradients, state ─┐
    model.py's saved tensors  ─► bytes a token of activations and KV ┴─► windows, in the order of a step
      phase 1  [reference prefix][actor prefix]                               │
      phase 2  [reference suffix][actor suffix][prefix backward]              │ what lives at once in each
      phase 3  [optimizer]                                                    ▼
                           peak of each phase · host memory · verdict · largest budgets · defaults for train.py

Weights are exact: the same tables that train.py allocates from. Activations are what autograd saves in model.py, term
by term: tests/test_plan.py counts what real passes save on a CPU and finds the formulas within 0.1 %. On a GPU three
kernels save something else (fused RMSNorm, flash attention, its variable-length form in the vision tower); those terms
are derived from the kernels' signatures, and so are all temporaries: the README has runs at 3B and 7B beside their
plans. What the CUDA runtime and the engine's hold are stated constants. RESERVE stands for fragmentation and the rest.
Sizes are worst cases: every prompt and every response as long as its limit, and micro-batches as full of media as
shorter prompts can make them.

Run (no GPU, no weights, under 5 s):
    python plan.py --model qwen2.5-vl-32b --train-tp 8 --rollout-tp 4      # the paper's case, with its Table 1
    python plan.py --model qwen2.5-vl-7b --hbm-gib 141                     # how many GPUs, and with which settings
    python plan.py --table                                                 # every model on 80, 96 and 141 GiB
Left out on purpose: time (bench.py measures it), pipeline and context parallelism, disaggregated placement.
To change what an object costs, edit its function below; to change when it lives, edit _windows().
"""

import math
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, Literal, NamedTuple

import torch
import tyro

import configs
import optimizer
import weights
from arena import align
from memory import MemoryConfig

GIB = 2**30
RESERVE = 0.05  # share of a GPU that choose() leaves free
GPUS_PER_HOST = 8
# GPU, measured on H200s at 3B and 7B: both processes' contexts with the trainer's cuBLAS, what collectives add (TP 2),
# what an engine holds between rollouts, and how much more than a step needs its allocator keeps in pieces of all sizes.
TRAINER_RUNTIME_GIB, COLLECTIVES_GIB, ENGINE_RUNTIME_GIB, ENGINE_PIECES = 3.0, 1.2, 0.7, 1.7
# Host: measured on the CPU machine, engine 3 GiB, trainer 0.8 after its imports; the trainer's with room for CUDA.
ENGINE_HOST_GIB, TRAINER_HOST_GIB = 3.0, 2.0
FILLED = 8  # to multiples of which layers.py fills up an MLP's inner width (its ALIGN)
FULL_TOKENS = 8192  # below some 8 to 16 thousand tokens at once an H200 waits for the host's launches (measured)
ADMITTED_TOKENS = 8192  # an engine's prefill waits for the host's launches, however few prompts it has (measured)
OFFLOAD_FACTOR = (
    1.2  # what two operations save is copied to the host twice (assumed; 1.09 to 1.16 when an MLP kept more)
)

# B prompts, N responses a prompt, P prompt tokens, S response tokens, b bytes of an element. All sizes are of one GPU.


# ---- what is planned -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """One step's data, and the settings that decide memory. Defaults are train.py's, but for longer responses."""

    prompts: int = 32
    """Prompt groups a step, over all replicas."""
    n: int = 8
    """Responses a prompt."""
    prompt_tokens: int = 4096
    """Longest prompt, visual tokens included (--data.max-prompt-tokens)."""
    visual_tokens: int = 1024
    """Visual tokens in it; the vision tower sees four patches for each. 1024: 16 frames of 128 * 28 * 28 pixels."""
    response_tokens: int = 512
    """Longest response (--rollout.max-new-tokens)."""
    micro_tokens: int = 8192
    """Tokens that the trainer computes at once: prompts together, and their responses together, up to so many; what is
    longer goes alone."""
    slice_tokens: int = 128
    """Visual tokens of a temporal slice (two frames of a clip, or an image), which a rank encodes whole. 128: frames of
    128 * 28 * 28 pixels, train.py's --data.max-pixels."""
    kv_cache_gib: float = 0.0
    """The engine's KV cache on a GPU, GiB. 0: room for all responses that it decodes at once, at full length."""
    max_num_seqs: int = 64
    """Most responses that one engine decodes at once."""
    max_num_batched_tokens: int = 4096
    """Most tokens of one engine step."""
    chunk_mib: float = 64.0
    """Chunk of the streamed optimizer, MiB; three are in use."""
    ahead_gib: float = 0.0
    """Room for more chunks, which are loaded beside the last micro-batch of Phase 2, GiB."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations."""
    qkv: Literal["fused", "split"] = "fused"
    """As train.py's: fused keeps a second copy of the QKV weights in the trainer's order."""
    overlap: Literal["none", "prefix"] = "prefix"
    """prefix: all prefixes run beside decode, so all boundaries exist at once. none: micro-batch by micro-batch."""
    exact: bool = False
    """Every prompt has just so many tokens, as in a given step; otherwise at most so many, and a micro-batch may hold
    more media than longest prompts would."""
    reference: bool = True
    """Whether a frozen reference model is scored (--algo.kl-coef above 0)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels run: they differ in what they save. On a CPU only what the ledger sees counts, no temporaries."""

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    def validate(self) -> None:
        """Raise ValueError naming the field, its value and the fix."""
        counts = "prompts", "n", "response_tokens", "micro_tokens", "slice_tokens", "max_num_seqs"
        for name in (*counts, "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.prompt_tokens >= 2, "prompt_tokens", self.prompt_tokens, "2 or more")
        most = f"0 to the prompt's {self.prompt_tokens}"
        _require(0 <= self.visual_tokens <= self.prompt_tokens, "visual_tokens", self.visual_tokens, most)
        _require(self.kv_cache_gib >= 0, "kv_cache_gib", self.kv_cache_gib, "0 (automatic) or more")
        _require(self.chunk_mib >= 1, "chunk_mib", self.chunk_mib, "1 or more")
        _require(self.ahead_gib >= 0, "ahead_gib", self.ahead_gib, "0 (none) or more")


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
    formulas: dict[str, str]  # tag -> how its bytes come about
    kv_bytes: int  # of the engine's KV cache

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
    _require(train_tp > 0 and world > 0 and world % train_tp == 0, "train_tp", train_tp, f"a divisor of {world} GPUs")
    chunks = policy.state_offload and policy.chunked_optimizer
    _require(chunks or not workload.ahead_gib, "ahead_gib", workload.ahead_gib, "0: no chunks come from the host")
    replicas = world // train_tp
    _require(workload.prompts % replicas == 0, "prompts", workload.prompts, f"a multiple of the {replicas} replicas")
    held, groups = _held(hf_config, train_tp, rollout_tp, workload), workload.prompts // replicas
    sizes = _sizes(hf_config, train_tp, rollout_tp, workload, policy, held, groups)
    formulas = _formulas(hf_config, train_tp, rollout_tp, workload, policy, held, groups)
    host = _host(sizes, workload, policy, rollout_tp)
    windows = list(_windows(sizes, workload, policy))
    settings = hf_config, world, train_tp, rollout_tp, workload, policy
    return Plan(*settings, windows, host, formulas, sizes["rollout_kv"])


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"--{name.replace('_', '-')} {value}: expected {expected}")


# ---- weights, exact --------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Weights of one GPU at some pair of degrees."""

    snapshot: int  # bytes of the rollout-sized shard that trainer and engine share
    fused: int  # bytes of the trainer's own QKV, Case 3
    numel: int  # parameters of one training shard
    largest: int  # elements of its largest tensor: one gradient of it exists at a time beside the gradient buffer


_HELD: dict[tuple, Held] = {}  # building a table takes 0.05 s, and a search asks for the same one many times


def _held(hf_config, train_tp: int, rollout_tp: int, w: Workload) -> Held:
    text, vision = hf_config.text_config, hf_config.vision_config
    key = (*_dims(hf_config, 1), vision.hidden_size, vision.intermediate_size, vision.depth, vision.out_hidden_size)
    key += (text.vocab_size, hf_config.tie_word_embeddings, train_tp, rollout_tp, w.qkv, w.dtype)
    if key not in _HELD:
        layout = weights.layout(hf_config, train_tp, rollout_tp, w.qkv, getattr(torch, w.dtype))
        numels = [math.prod(shard.storage) for shard in weights.shards(layout, 0)]  # the same on every rank
        _HELD[key] = Held(layout.nbytes, weights.fused_nbytes(layout), sum(numels), max(numels))
    return _HELD[key]


# ---- activations, per token ------------------------------------------------------------------------------------------


# Widths of one rank's language model, in elements; kv: of keys, and as many of values.
Dims = namedtuple("Dims", "hidden query kv inner heads head layers vocab")


def _dims(hf_config, tp: int) -> Dims:
    text = hf_config.text_config
    head, heads = text.hidden_size // text.num_attention_heads, text.num_attention_heads // tp
    vocab = align(text.vocab_size, weights.VOCAB_MULTIPLE) // tp
    kv, inner = text.num_key_value_heads * head // tp, text.intermediate_size // tp
    return Dims(text.hidden_size, heads * head, kv, inner, heads, head, text.num_hidden_layers, vocab)


def layer_bytes(d: Dims, w: Workload) -> int:
    """Saved by one layer of the language model for one token, if it is not computed again.

    Two RMSNorms, each with its output, which a matrix product reads; values, rotated queries and keys, attention output
    and log-sum-exp; gate and up. The rotary table comes once for all layers.
    """
    b = w.itemsize
    attention = b * (2 * d.query + 2 * d.kv) + 4 * d.heads
    return 2 * (_norm_bytes(d.hidden, w) + b * d.hidden) + attention + b * 2 * align(d.inner, FILLED)


def _rotary_bytes(d: Dims) -> int:
    """The rotary table for one token: cosine and sine in FP32, each for half a head."""
    return 4 * d.head


def _norm_bytes(hidden: int, w: Workload) -> int:
    """Saved by one RMSNorm for one token or patch, without its output: input and 1/rms; on a CPU also the normalised
    input, both in FP32."""
    return (w.itemsize if w.device == "cuda" else 8) * hidden + 4


def _input_bytes(hidden: int, w: Workload) -> int:
    """Of a layer's input that its first norm saves as the same tensor: all, unless that saves another dtype, BF16 on a
    CPU."""
    return w.itemsize * hidden if w.device == "cuda" or w.itemsize == 4 else 0


def block_bytes(hf_config, w: Workload) -> int:
    """Saved by one block of the vision tower for one patch. A rank has patches of its own, all of each."""
    v, b = hf_config.vision_config, w.itemsize
    # Rotated queries and keys beside the values, attention output (on a CPU gathered from the windows into a second).
    attention = b * v.hidden_size * (4 if w.device == "cuda" else 5) + 4 * v.num_heads
    inner = align(v.intermediate_size, FILLED)
    return 2 * (_norm_bytes(v.hidden_size, w) + b * v.hidden_size) + attention + 2 * b * inner


def vision_bytes(hf_config, w: Workload, again: bool = False) -> int:
    """Saved by the vision tower for one patch: pixels, blocks, merger. With `again` a block keeps its input only; the
    rotary table (cosine and sine) of all blocks is then no saved tensor."""
    v, b = hf_config.vision_config, w.itemsize
    pixels = b * v.in_channels * v.temporal_patch_size * v.patch_size**2 + 4  # and its token's place
    blocks = v.depth * (b * v.hidden_size if again else block_bytes(hf_config, w))
    rotary = 0 if again else 4 * (v.hidden_size // v.num_heads)
    return blocks + rotary + _norm_bytes(v.hidden_size, w) + 3 * b * v.hidden_size + pixels


def visual_share(w: Workload, tp: int) -> int:
    """Visual tokens of a prompt that one rank of a replica encodes, of those in a micro-batch: the rank with the most,
    in whole slices."""
    prompts = max(1, min(w.prompts, w.micro_tokens // w.prompt_tokens))
    slices = math.ceil(prompts * math.ceil(w.visual_tokens / w.slice_tokens) / tp)
    return min(w.visual_tokens, math.ceil(slices * w.slice_tokens / prompts))


def prefix_bytes(hf_config, w: Workload, tp: int, again: bool = False, vision_again: bool = False) -> int:
    """Saved by the forward pass of one prompt's prefix: this rank's part of the media in the vision tower, then P − 1
    tokens through all layers but the last, of which only the norm is needed for its keys and values (held as the
    boundary, not as saved tensors). With `again` (recompute_layers) those layers keep only their input; with
    `vision_again` (recompute_vision) only the tower's blocks do."""
    d, b = _dims(hf_config, tp), w.itemsize
    tokens = w.prompt_tokens - 1
    layers = (d.layers - 1) * (b * d.hidden if again else layer_bytes(d, w))
    patch = vision_bytes(hf_config, w, again or vision_again)
    return tokens * (layers + _last_bytes(d, w)) + 4 * visual_share(w, tp) * patch


def _last_bytes(d: Dims, w: Workload) -> int:
    """Saved by the last layer of a prefix for one token: its norm, and the rotary table."""
    return _norm_bytes(d.hidden, w) + w.itemsize * d.hidden + _rotary_bytes(d)


def prefix_again_bytes(hf_config, w: Workload, tp: int) -> int:
    """What computing one prompt's layers again adds, at most, to its prefix_bytes: a layer, once the last one's own is
    gone, or a block of the vision tower, once all of the language model's is gone."""
    d, v, tokens, patches = _dims(hf_config, tp), hf_config.vision_config, w.prompt_tokens - 1, 4 * visual_share(w, tp)
    language = prefix_bytes(hf_config, replace(w, visual_tokens=0), tp, again=True)
    layer = tokens * (_layer_again_bytes(d, w) - _last_bytes(d, w))
    block = block_bytes(hf_config, w) + 4 * (v.hidden_size // v.num_heads) - _input_bytes(v.hidden_size, w)
    return max(0, layer, patches * block - language)


def _layer_again_bytes(d: Dims, w: Workload) -> int:
    """What one layer, computed again, adds to its input for one token; the rotary table with it."""
    return layer_bytes(d, w) + _rotary_bytes(d) - _input_bytes(d.hidden, w)


def boundary_bytes(hf_config, w: Workload, tp: int) -> int:
    """The boundary of one prompt's P − 1 tokens, one role: each layer's keys and values."""
    return (w.prompt_tokens - 1) * kv_token_bytes(hf_config, w, tp)


def kv_token_bytes(hf_config, w: Workload, tp: int) -> int:
    """Keys and values of one token in every layer."""
    d = _dims(hf_config, tp)
    return 2 * d.layers * d.kv * w.itemsize


def suffix_token_bytes(hf_config, w: Workload, tp: int, again: bool = False) -> int:
    """Saved by the forward pass of a suffix for one response token: layers (with `again` only their inputs), final
    norm, logits and three FP32 numbers about them. The prompt's keys and values are read where the boundary holds
    them."""
    d, b = _dims(hf_config, tp), w.itemsize
    layers = d.layers * b * d.hidden if again else d.layers * layer_bytes(d, w) + _rotary_bytes(d)
    return layers + _norm_bytes(d.hidden, w) + b * d.hidden + b * d.vocab + 12


def suffix_again_token_bytes(hf_config, w: Workload, tp: int) -> int:
    """At most in the backward of a suffix for one response token: the inputs of all layers, and the last one computed
    again."""
    d = _dims(hf_config, tp)
    return d.layers * w.itemsize * d.hidden + _layer_again_bytes(d, w)


class Passes(NamedTuple):
    """Tokens that a replica computes at once, and those whose prefixes wait."""

    prompt: int  # of a micro-batch
    response: int  # of one pass over its suffixes
    there: int  # prompt tokens whose reference prefixes exist at once
    kept: int  # and whose actor prefixes do, which --memory.keep-tokens bounds
    batch: Workload  # with as many visual tokens a prompt as a micro-batch can have
    waiting: Workload  # and those whose activations are kept


def passes(w: Workload, policy: MemoryConfig, groups: int) -> Passes:
    """Of a replica with `groups` prompts. Shorter prompts with the same media fill up a micro-batch, and what is kept:
    neither need be a whole number of longest prompts, and the share of visual tokens in it may be larger than in
    those."""
    whole = groups * w.prompt_tokens
    prompt = max(w.prompt_tokens, min(whole, w.micro_tokens))
    response = min(max(w.micro_tokens, w.response_tokens), prompt * w.n * w.response_tokens // w.prompt_tokens)
    there = whole if w.overlap == "prefix" else prompt
    bounded = w.overlap == "prefix" and policy.activations == "keep" and policy.keep_tokens
    kept = min(there, bounded or there)

    def densest(tokens: int, most: int) -> Workload:
        if w.exact:
            return w
        visual = max(w.visual_tokens, min(groups * w.visual_tokens, most))
        return replace(w, visual_tokens=min(w.prompt_tokens, math.ceil(visual * w.prompt_tokens / tokens)))

    one = w.micro_tokens if there == prompt else there  # a longer prompt goes alone
    batch, waiting = densest(prompt, w.micro_tokens), densest(kept, min(kept, one))
    return Passes(prompt, response, there, kept, batch, waiting)


# ---- what is derived but not measured --------------------------------------------------------------------------------


def _prefix_work(hf_config, w: Workload, tp: int) -> int:
    """Temporaries of a prefix pass of one prompt: one layer of the language model, or one block of the vision tower."""
    d, v, b = _dims(hf_config, tp), hf_config.vision_config, w.itemsize
    language = w.prompt_tokens * b * (3 * d.hidden + 3 * d.inner)
    return max(language, 4 * visual_share(w, tp) * b * (6 * v.hidden_size + 3 * v.intermediate_size))


def _suffix_work(hf_config, w: Workload, tp: int) -> int:
    """Temporaries of one layer of the language model in the backward of a suffix, for one response token."""
    d = _dims(hf_config, tp)
    return w.itemsize * (3 * d.hidden + 3 * d.inner)


def _engine_step(hf_config, w: Workload, rollout_tp: int) -> int:
    """Of the engine in a rollout: the activations of one step or of its vision tower, and FP32 logits of what it
    samples. It gives them back with the KV cache."""
    d, b = _dims(hf_config, rollout_tp), w.itemsize
    tokens = w.max_num_batched_tokens * b * (4 * d.hidden + 3 * d.inner)
    visual = max(w.visual_tokens, w.max_num_batched_tokens * w.visual_tokens // w.prompt_tokens)
    vision = 4 * min(visual, w.max_num_batched_tokens) * b * 8 * hf_config.vision_config.hidden_size
    logits = w.max_num_seqs * hf_config.text_config.vocab_size * (b + 3 * 4)
    return int(ENGINE_PIECES * (max(tokens, vision) + logits))


def kv_bytes(hf_config, w: Workload, rollout_tp: int, responses: int) -> int:
    """KV cache that `responses` need at full length, those of one group sharing its prompt; in whole MiB."""
    tokens = math.ceil(responses / w.n) * w.prompt_tokens + responses * w.response_tokens
    return align(tokens * kv_token_bytes(hf_config, w, rollout_tp), 2**20)


# ---- objects, and when they live -------------------------------------------------------------------------------------


def _sizes(hf_config, train_tp: int, rollout_tp: int, w: Workload, policy: MemoryConfig, held: Held, groups: int):
    """{object: bytes}, of all prompts of a replica whose prefixes wait, or `…_mb` of one micro-batch, `…_kept` of those
    whose activations are kept; `suffix…` of one pass; `…_work` are temporaries."""
    d, gpu, at_once = _dims(hf_config, train_tp), w.device == "cuda", passes(w, policy, groups)
    model, again = (hf_config, at_once.batch, train_tp), policy.recompute_layers
    boundary, prefix = boundary_bytes(*model), prefix_bytes(*model, again)
    every = prefix_bytes(hf_config, w, train_tp, again) if w.overlap == "prefix" else prefix
    config, vision = optimizer.OptimizerConfig(chunk_mib=w.chunk_mib, ahead_gib=w.ahead_gib), hf_config.vision_config
    patches = 4 * visual_share(at_once.batch, train_tp)
    layer = (w.prompt_tokens - 1) * layer_bytes(d, w), patches * vision_bytes(hf_config, w) // vision.depth
    responses = min(w.max_num_seqs, math.ceil(groups * rollout_tp / train_tp) * w.n)
    waits = train_tp, again, policy.recompute_vision and w.overlap == "prefix"
    kept, last = (prefix_bytes(hf_config, step, *waits) for step in (at_once.waiting, at_once.batch))

    def prompts(one: int, tokens: int) -> int:
        """Bytes of this many prompt tokens, from those of one prompt."""
        return one * tokens // w.prompt_tokens

    return {
        "layers": d.layers,
        "snapshot": held.snapshot + held.fused,
        "engine_weights": held.snapshot,
        "engine_other": gpu * int(ENGINE_RUNTIME_GIB * GIB),
        "engine_step": gpu * _engine_step(hf_config, w, rollout_tp),
        "other": gpu * int((TRAINER_RUNTIME_GIB + COLLECTIVES_GIB * (train_tp > 1)) * GIB),
        "rollout_kv": int(w.kv_cache_gib * GIB) or kv_bytes(hf_config, w, rollout_tp, responses),
        "reference": w.itemsize * held.numel,
        "gradient": 4 * held.numel,
        "state": 12 * held.numel,
        "workspace": optimizer.workspace_bytes(config, 0 if policy.chunked_optimizer else held.numel),
        "ahead": optimizer.ahead_bytes(config, held.numel) if policy.chunked_optimizer else 0,
        "boundary": prompts(boundary, at_once.there),
        "boundary_kept": prompts(boundary, at_once.kept),
        "boundary_mb": prompts(boundary, at_once.prompt),
        "prefix": prompts(every, at_once.there),
        "prefix_kept": prompts(kept, at_once.kept),
        "some_later": at_once.kept < at_once.there,
        "prefix_mb": prompts(prefix, at_once.prompt),
        "prefix_last": prompts(last, at_once.prompt),  # of the last micro-batch, if it waited
        "prefix_layer": prompts(max(layer), at_once.prompt),
        "prefix_again": prompts(prefix_again_bytes(*model), at_once.prompt) if again else 0,
        "suffix": at_once.response * suffix_token_bytes(*model, again),
        "suffix_again": at_once.response * suffix_again_token_bytes(*model),
        "suffix_work": gpu * at_once.response * _suffix_work(*model),
        "logprobs": groups * w.n * w.response_tokens * (13 + 4 * w.reference),
        "prefix_work": gpu * prompts(_prefix_work(*model), at_once.prompt),
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
    waiting, own, last = (
        s[f"prefix_{which}"] - s[f"boundary_{edge}"] * held_twice // s["layers"] if kind == "keep" else 0
        for which, edge in (("kept", "kept"), ("mb", "mb"), ("last", "mb"))
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
    loaded = {"optimizer_state": s["ahead"]} if s["ahead"] else {}  # from the last micro-batch of phase 2 on
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
    if not ahead or s["some_later"]:  # micro-batch by micro-batch, once those that waited are gone
        when = " of a later prefix" * ahead
        saved = s["prefix_mb"] if kind == "offload" else own
        yield window("2", f"actor prefix{when}", s["prefix_work"], **base, prefix_activations=saved)
        yield from training(base, own, when)
    elif loaded:
        yield from training(base, last, " of the last micro-batch")
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


def _kept(policy: MemoryConfig) -> str:
    some = policy.activations == "keep" and policy.keep_tokens
    return policy.activations + f" {policy.keep_tokens} tokens" * bool(some)


def _formulas(hf_config, train_tp: int, rollout_tp: int, w: Workload, policy: MemoryConfig, held: Held, groups: int):
    """How each object's bytes come about, {tag: text}."""
    d, b, tokens = _dims(hf_config, train_tp), w.itemsize, w.prompt_tokens - 1
    shard = f"{held.numel / 1e9:.3f} B parameters of a training shard"
    again = policy.recompute_layers
    a_layer, kept = (b * d.hidden, ", a layer at a time again") if again else (layer_bytes(d, w), "")
    tower_again = policy.recompute_vision and policy.activations == "keep" and w.overlap == "prefix"
    patch, at_once = vision_bytes(hf_config, w, again or tower_again), passes(w, policy, groups)
    patches = 4 * visual_share(at_once.waiting if policy.activations == "keep" else at_once.batch, train_tp)
    prefix = f"{a_layer} B a token and layer x {d.layers} x {tokens} + {patch} B a patch x {patches}"
    state = "" if policy.state_offload else f"12 B x {shard}, always, and "
    boundary = f"2 x {d.layers} layers x {d.kv // d.head} heads x {d.head} x {b} B x {tokens} tokens x {groups} prompts"
    fused = f" + {held.fused / GIB:.2f} GiB QKV in the trainer's order" if held.fused else ""
    kv = f"{kv_token_bytes(hf_config, w, rollout_tp) / 1024:g} KiB a token"
    chunk = optimizer.OptimizerConfig(chunk_mib=w.chunk_mib, ahead_gib=w.ahead_gib)
    ahead = optimizer.ahead_chunks(chunk, held.numel) if policy.chunked_optimizer else 0
    chunks = f"3 x {w.chunk_mib:g} MiB" + f", and {ahead} more from the last micro-batch of phase 2 on" * bool(ahead)
    return {
        "snapshot": f"{b} B x {held.snapshot / b / 1e9:.3f} B parameters of a rollout shard{fused}",
        "engine_weights": f"{b} B x {held.snapshot / b / 1e9:.3f} B: the engine's own copy",
        "engine_other": f"{ENGINE_RUNTIME_GIB:g} GiB + in a rollout a step of {w.max_num_batched_tokens} tokens",
        "other": "CUDA and collectives of both processes + the window's temporaries",
        "rollout_kv": f"{kv}; {'as given' if w.kv_cache_gib else f'up to {w.max_num_seqs} responses at full length'}",
        "actor_boundary": boundary,
        "reference_boundary": boundary,
        "reference": f"{b} B x {shard}",
        "prefix_activations": f"{prefix}, a prompt; {_kept(policy)}{kept}",
        "suffix_activations": f"({a_layer} B x {d.layers} layers + {b * d.vocab} B of logits) a token x "
        f"{at_once.response} a pass{kept}",
        "logprobs": f"{13 + 4 * w.reference} B x {groups * w.n * w.response_tokens} response tokens",
        "gradient": f"4 B x {shard}",
        "optimizer_state": state + (chunks if policy.chunked_optimizer else f"12 B x {shard}"),
    }


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
        for tokens in _halves(w.micro_tokens, 1024)[1:]
    ]
    enough = sum(tokens >= FULL_TOKENS for tokens in _halves(w.micro_tokens, 1024)[1:])
    yield from smaller[:enough]
    if policy.activations == "keep":
        groups = w.prompts * p.train_tp // p.world
        if w.overlap == "prefix" and not policy.recompute_vision and not policy.recompute_layers:
            text, cost = "--memory.recompute-vision", "a second forward pass of the vision tower"
            yield change(text, cost, recompute_vision=True)
        for tokens in (groups // k * w.prompt_tokens for k in (2, 4) if not policy.keep_tokens):
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
    at_once = passes(p.workload, p.policy, p.workload.prompts * p.train_tp // p.world)
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
        "prompt": _largest(lambda x: fit(prompt_tokens=x), max(2, w.visual_tokens), most - w.response_tokens),
        "visual": _largest(lambda x: fit(prompt_tokens=x, visual_tokens=x), 2, most - w.response_tokens),
        "response": _largest(lambda x: fit(response_tokens=x), 1, most - w.prompt_tokens),
        "kv_gib": _largest(lambda x: fit(kv_cache_gib=x / 4), 1, int(4 * hbm_bytes / GIB)) / 4,
    }


def _largest(good: Callable[[int], bool], low: int, high: int) -> int:
    """The largest whole number from `low` to `high` for which good() holds, if it holds for one of high, high / 2, …,
    low and from there up to some limit; else 0. It need not hold below: short prompts can be all media."""
    starts = [*_halves(high, low), low] if low <= high else []
    if (low := next((x for x in starts if good(x)), 0)) == 0:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


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


CHOSEN = tuple(name for name in Settings.__annotations__ if name not in ("offload_gib", "plan", "reasons"))


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
        _require(given.get(name, 1) >= 1, name, given.get(name), "1 or more")
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
    degrees = f"train TP {nearest.train_tp}, rollout TP {nearest.rollout_tp}, {_activations(nearest.policy)}"
    gpus = f"{world} GPU{'s' * (world > 1)} of {hbm_bytes / GIB:.4g} GiB"
    text = verdict(nearest, room, host_bytes).text
    raise ValueError(f"{gpus}, {RESERVE:.0%} in reserve: nearest is {degrees}, which {text}")


def _activations(policy: MemoryConfig) -> str:
    return _kept(policy) + " by layer" * policy.recompute_layers


def _candidates(hf_config, world: int, workload: Workload, policy: MemoryConfig, given: dict) -> Iterator[Plan | str]:
    """Plans in order of preference that agree with what is given; where the degrees cannot be, why."""
    for train_tp, rollout_tp, kinds, layers in _kinds(world, policy, given):
        groups = max(1, workload.prompts * train_tp // world)
        sequences = _halves(min(256, math.ceil(groups * rollout_tp / train_tp) * workload.n), workload.n)
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
        return activations == given.get("activations", "keep" if given.get("keep_tokens") else activations)

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
    prompts = [k * w.prompt_tokens for k in _halves(max(1, 2 * FULL_TOKENS // w.prompt_tokens))]
    return prompts + [tokens for tokens in (4096, 2048) if tokens < w.prompt_tokens]


def _halves(start: int, least: int = 1) -> list[int]:
    """start, start / 2, … down to `least`."""
    return [start, *_halves(start // 2, least)] if start // 2 >= least else [start]


def _settings(p: Plan, room: float, given: dict) -> Settings:
    """The plan with the KV cache in round figures, as many prompts kept as fit if it keeps some, and the largest chunk
    that is not what needs most; but for what is given."""
    w, groups = p.workload, p.workload.prompts * p.train_tp // p.world
    if "kv_cache_gib" not in given:
        rounded = p.replan(kv_cache_gib=math.ceil(4 * p.kv_bytes / GIB) / 4)
        p = rounded if fits(rounded, room) else p.replan(kv_cache_gib=p.kv_bytes / GIB)
    if "max_num_batched_tokens" not in given:
        several = p.replan(max_num_batched_tokens=max(ADMITTED_TOKENS, w.max_num_batched_tokens))
        p = several if fits(several, room) else p
    if p.policy.keep_tokens and "keep_tokens" not in given:
        fixed = p.policy.recompute_layers or "recompute_vision" in given
        p = _keeping_most(p, groups, room, [p.policy.recompute_vision] if fixed else [False, True])
    if "chunk_mib" not in given:
        larger = (p.replan(chunk_mib=chunk) for chunk in (512.0, 256.0, 128.0))
        p = next((q for q in larger if q.peak().phase in ("1", "2")), p)
    offload = math.ceil(p.host["offloaded activations"] / GIB)
    reasons = _reasons(p, groups) | dict.fromkeys(given, "as given")
    reasons |= {"offload_gib": "what all groups of a replica save"} if offload else {}
    degrees, w = {"train_tp": p.train_tp, "rollout_tp": p.rollout_tp}, p.workload
    chosen = degrees | {name: getattr(w if hasattr(w, name) else p.policy, name) for name in CHOSEN[2:]}
    return Settings(**chosen, offload_gib=offload, plan=p, reasons=reasons)


def _keeping_most(p: Plan, groups: int, room: float, towers: list[bool]) -> Plan:
    """With as many whole prompts kept as fit, all `groups` of them perhaps; the vision tower as one of `towers` says,
    whichever spares the time after the rollout more matrix products. `p` fits."""
    vision, w = p.hf_config.vision_config, p.workload
    d, wide = _dims(p.hf_config, 1), vision.hidden_size
    language = w.prompt_tokens * d.layers * d.hidden * (2 * d.query + 2 * d.kv + 3 * d.inner)
    tower = 4 * w.visual_tokens * vision.depth * wide * (4 * wide + 3 * vision.intermediate_size)
    at_once, found = max(1, w.micro_tokens // w.prompt_tokens), []
    for again in towers:

        def kept(k: int, again: bool = again) -> Plan:
            return p.replan(keep_tokens=k * w.prompt_tokens if k < groups else 0, recompute_vision=again)

        most = _largest(lambda k, kept=kept: fits(kept(k), room), p.policy.keep_tokens // w.prompt_tokens, groups)
        whole = most if most == groups else most // at_once * at_once  # micro-batches
        found += [(whole * (language + (0 if again else tower)), kept(most))] if most else []
    return max(found, key=lambda pair: pair[0])[1]


def _reasons(p: Plan, groups: int) -> dict[str, str]:
    """A line for each setting."""
    w, policy, at_once = p.workload, p.policy, passes(p.workload, p.policy, groups)
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


# ---- printing --------------------------------------------------------------------------------------------------------

NOMINAL = 32.5e9  # parameters with which the paper's weight rows come out


def table1(hf_config, w: Workload) -> list[tuple[str, float, float | None, float, str]]:
    """Rollplex, Table 1 (everything resident at once, train TP 8, rollout TP 4): component, GiB a GPU from the exact
    tables, from NOMINAL parameters (None: not a function of them), the paper's, and how."""
    held, nominal, token = _held(hf_config, 8, 4, w), NOMINAL / 8, kv_token_bytes(hf_config, w, 4)
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
        ("rollout: runtime buffers", _engine_step(hf_config, w, 4), None, 3.0, "the paper: 2 to 4"),
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


def report(p: Plan, hbm_bytes: float, host_bytes: float = 0) -> str:
    """Objects by phase with their formulas, host memory, verdict and largest budgets."""
    w, peaks = p.workload, [p.peak(phase) for phase in ("start-up", "1", "2", "3")]
    tags = [tag for tag in p.formulas if any(window.bytes.get(tag) for window in peaks)]
    lines = [
        f"{p.world} GPUs, train TP {p.train_tp}, rollout TP {p.rollout_tp}, {w.dtype}, --overlap {w.overlap}, "
        f"activations {_activations(p.policy)}",
        f"{w.prompts} prompts of {w.prompt_tokens} tokens, {w.visual_tokens} visual; {w.n} responses of "
        f"{w.response_tokens}; {w.micro_tokens} tokens at once\n",
        f"GiB a GPU at each peak{'start-up':>10s}" + "".join(f"{f'phase {i}':>9s}" for i in "123"),
    ]
    for tag in tags:
        cells = "".join(f"{window.bytes[tag] / GIB:9.2f}" if window.bytes.get(tag) else f"{'':9s}" for window in peaks)
        lines.append(f"  {tag:21s}{cells}   {p.formulas[tag]}")
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


def choice(settings: Settings) -> str:
    """Every chosen setting with its reason, a line each."""
    return "\n".join(f"  {k:24s}{getattr(settings, k)!s:>10s}   {reason}" for k, reason in settings.reasons.items())


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
    degrees = f"{s.train_tp} / {s.rollout_tp}, {_activations(s.plan.policy)}"
    return f"{degrees}: {s.plan.peak_bytes / GIB:.0f}, host {s.plan.host_bytes / GIB:.0f}"


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


def _enough(args: Args, hf_config, hbm_bytes: float) -> Plan:
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


def run(args: Args) -> None:
    """Print what the arguments ask for. Raises ValueError naming the field where something cannot be."""
    if args.table:
        for row in markdown(args.workload, args.memory):
            print(row, flush=True)
        return
    hf_config, hbm_bytes = configs.load_config(args.model), (args.memory.hbm_limit_gib or args.hbm_gib) * GIB
    for name in ("gpus", "train_tp", "rollout_tp", "host_gib"):
        _require(getattr(args, name) >= 0, name, getattr(args, name), "0 (automatic) or more")
    _require(hbm_bytes > 0, "hbm_gib", args.hbm_gib, "above 0")
    _require(args.train_tp > 0 or not args.rollout_tp, "rollout_tp", args.rollout_tp, "--train-tp beside it")
    degrees = args.gpus or args.train_tp, args.train_tp, args.rollout_tp or args.train_tp
    if args.table1 or (args.model == "qwen2.5-vl-32b" and degrees[1:] == (8, 4)):
        _print_table1(hf_config, args.workload)
    if args.train_tp:
        planned = plan(hf_config, *degrees, args.workload, args.memory)
    else:
        planned = _enough(args, hf_config, hbm_bytes)
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
    main()

"""Sizes: the bytes of each object of a step on one GPU, from the model's dimensions and the step's settings alone.

    weights.py's tensor table ─► weights, gradients, state: exact, the same table that trainer.py allocates from
    model.py's saved tensors  ─► activations and boundaries, by token: what autograd saves, term by term
    kernels' signatures       ─► what GPU kernels save differently, and temporaries: derived

tests/test_sizes.py counts what real passes save on a CPU and finds the formulas within 0.1 %. On a GPU three kernels
save something else (fused RMSNorm, flash attention, its variable-length form in the vision tower); those terms are
derived from the kernels' signatures, and so are all temporaries. Sizes are worst cases: every prompt and every response
as long as its limit, and micro-batches as full of media as shorter prompts can make them.

require() words a setting's error, here and in train.py.

Run:
    python plan.py --model qwen2.5-vl-7b --gpus 2 --train-tp 2     # prints them, with their formulas
Left out on purpose: when an object lives (plan.py).
To change what an object costs, edit its function here.
"""

import math
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

import weights
from arena import align
from memory import MemoryConfig

GIB = 2**30
ENGINE_PIECES = (
    1.7  # how much more than a step needs an engine's allocator keeps in pieces of all sizes (H200, 3B, 7B, old runner)
)
FILLED = 8  # to multiples of which layers.py fills up an MLP's inner width (its ALIGN)

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
    """Room for more chunks, which are loaded beside the last micro-batches of Phase 2, GiB."""
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
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.prompt_tokens >= 2, "prompt_tokens", self.prompt_tokens, "2 or more")
        most = f"0 to the prompt's {self.prompt_tokens}"
        require(0 <= self.visual_tokens <= self.prompt_tokens, "visual_tokens", self.visual_tokens, most)
        require(self.kv_cache_gib >= 0, "kv_cache_gib", self.kv_cache_gib, "0 (automatic) or more")
        require(self.chunk_mib >= 1, "chunk_mib", self.chunk_mib, "1 or more")
        require(self.ahead_gib >= 0, "ahead_gib", self.ahead_gib, "0 (none) or more")


def require(ok: bool, name: str, value: object, expected: str) -> None:
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


def held_weights(hf_config, train_tp: int, rollout_tp: int, w: Workload) -> Held:
    text, vision = hf_config.text_config, hf_config.vision_config
    key = (*dims(hf_config, 1), vision.hidden_size, vision.intermediate_size, vision.depth, vision.out_hidden_size)
    key += (text.vocab_size, hf_config.tie_word_embeddings, train_tp, rollout_tp, w.qkv, w.dtype)
    if key not in _HELD:
        layout = weights.layout(hf_config, train_tp, rollout_tp, w.qkv, getattr(torch, w.dtype))
        numels = [math.prod(shard.storage) for shard in weights.shards(layout, 0)]  # the same on every rank
        _HELD[key] = Held(layout.nbytes, weights.fused_nbytes(layout), sum(numels), max(numels))
    return _HELD[key]


# ---- activations, per token ------------------------------------------------------------------------------------------


# Widths of one rank's language model, in elements; kv: of keys, and as many of values.
Dims = namedtuple("Dims", "hidden query kv inner heads head layers vocab")


def dims(hf_config, tp: int) -> Dims:
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
    d, b = dims(hf_config, tp), w.itemsize
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
    d, v, tokens, patches = dims(hf_config, tp), hf_config.vision_config, w.prompt_tokens - 1, 4 * visual_share(w, tp)
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
    d = dims(hf_config, tp)
    return 2 * d.layers * d.kv * w.itemsize


def suffix_token_bytes(hf_config, w: Workload, tp: int, again: bool = False) -> int:
    """Saved by the forward pass of a suffix for one response token: layers (with `again` only their inputs), final
    norm, logits and three FP32 numbers about them. The prompt's keys and values are read where the boundary holds
    them."""
    d, b = dims(hf_config, tp), w.itemsize
    layers = d.layers * b * d.hidden if again else d.layers * layer_bytes(d, w) + _rotary_bytes(d)
    return layers + _norm_bytes(d.hidden, w) + b * d.hidden + b * d.vocab + 12


def suffix_again_token_bytes(hf_config, w: Workload, tp: int) -> int:
    """At most in the backward of a suffix for one response token: the inputs of all layers, and the last one computed
    again."""
    d = dims(hf_config, tp)
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


def prefix_work(hf_config, w: Workload, tp: int) -> int:
    """Temporaries of a prefix pass of one prompt: one layer of the language model, or one block of the vision tower."""
    d, v, b = dims(hf_config, tp), hf_config.vision_config, w.itemsize
    language = w.prompt_tokens * b * (3 * d.hidden + 3 * d.inner)
    return max(language, 4 * visual_share(w, tp) * b * (6 * v.hidden_size + 3 * v.intermediate_size))


def suffix_work(hf_config, w: Workload, tp: int) -> int:
    """Temporaries of one layer of the language model in the backward of a suffix, for one response token."""
    d = dims(hf_config, tp)
    return w.itemsize * (3 * d.hidden + 3 * d.inner)


def engine_step_bytes(hf_config, w: Workload, rollout_tp: int) -> int:
    """Of the engine in a rollout: the activations of one step or of its vision tower, and FP32 logits of what it
    samples. It gives them back with the KV cache."""
    d, b = dims(hf_config, rollout_tp), w.itemsize
    tokens = w.max_num_batched_tokens * b * (4 * d.hidden + 3 * d.inner)
    visual = max(w.visual_tokens, w.max_num_batched_tokens * w.visual_tokens // w.prompt_tokens)
    vision = 4 * min(visual, w.max_num_batched_tokens) * b * 8 * hf_config.vision_config.hidden_size
    logits = w.max_num_seqs * hf_config.text_config.vocab_size * (b + 3 * 4)
    return int(ENGINE_PIECES * (max(tokens, vision) + logits))


def kv_bytes(hf_config, w: Workload, rollout_tp: int, responses: int) -> int:
    """KV cache that `responses` need at full length, those of one group sharing its prompt; in whole MiB."""
    tokens = math.ceil(responses / w.n) * w.prompt_tokens + responses * w.response_tokens
    return align(tokens * kv_token_bytes(hf_config, w, rollout_tp), 2**20)

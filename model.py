"""Model: Qwen2.5-VL on Megatron-Core, split at the first response position into a prefix and N suffixes.

    video ─► vision tower ─► projector ─┐                       once per prompt group and role
    prompt ids ─► embedding ────────────┴► [ P−1 tokens ] ──► K, V of every layer
                                                               │ ▲
                        detached leaves: the boundary ─────────┘ │ their gradients, once all suffixes are done
                                                               ▼ │
    last prompt token + response ─► embedding ─► [ T tokens, all responses in one row ] ─► log-probabilities

The prefix does not depend on the response, so it may run while the engine still decodes (Rollplex §3.1). Its K and V
(after rotary embedding) cross a boundary of detached leaves: suffix backward deposits gradients there, and
prefix_backward() sends the sum through the language model, the projector and the vision tower once per group. The last
prompt token belongs to the suffix, so that no hidden state has to cross the boundary.

With `recompute_layers` a pass that is trained keeps only the input of each layer and of each block of the vision tower;
backward computes one after the other again. K and V leave such a layer as its outputs, so that the boundary's gradients
find their way back into it.

The language model is tensor parallel; the ranks of a replica share out the media (vision.py). Attention across the
boundary is in attention.py, what becomes of the logits in logprobs.py. All parameters are views of memory that
weights.py lays out: this file only says which function they compute.

Run:
    python model.py                          # CPU or GPU: the tiny model's split pass; what sharing a prefix saves
    torchrun --nproc-per-node 2 model.py     # the same at TP 2
Left out on purpose: pipeline and context parallelism, other model families.
To add a model, add its configuration to configs.py, its tensors to weights.table() and its forward pass here.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformers import Qwen2_5_VLConfig

import hardware
from arena import Arena, align
from attention import Boundary, SharedPrefix, require_kernels, suffix_boundary
from configs import forbidden_ids
from layers import Again, Packed, gated_mlp, rotate
from logprobs import TargetLogprobs
from rollout import FORBIDDEN_BIAS
from vision import VisionTower, WithMedia
from weights import VOCAB_MULTIPLE

# B prompts, N responses a prompt, P prompt tokens, S response tokens (padded), T tokens of a pass (packed), H query
# heads, K key/value heads of this rank, D head size, V vocabulary rows of this rank. Megatron's activations are
# [tokens, batch, ...], here [T, 1, ...].


# ---- positions -------------------------------------------------------------------------------------------------------


def positions(input_ids: list[int], grid_thw: list[list[int]], second_per_grid: list[float], config) -> torch.Tensor:
    """M-RoPE positions [3, P] of expanded prompt ids, by vLLM's rule (the original model's): text after a medium
    continues at its largest position + 1, and a video's temporal step is seconds per grid × tokens_per_second,
    truncated after the product."""
    merge = config.vision_config.spatial_merge_size
    out, start, i, medium = [], 0, 0, 0
    while i < len(input_ids):
        if input_ids[i] in (config.video_token_id, config.image_token_id):
            t, h, w = grid_thw[medium]
            block = np.indices((t, h // merge, w // merge)).reshape(3, -1)
            step = second_per_grid[medium] * config.vision_config.tokens_per_second
            if input_ids[i] == config.video_token_id:
                block[0] = (block[0] * step).astype(np.int64)
            medium += 1
        else:
            end = i
            while end < len(input_ids) and input_ids[end] not in (config.video_token_id, config.image_token_id):
                end += 1
            block = np.broadcast_to(np.arange(end - i), (3, end - i))
        out.append(block + start)
        start = int(out[-1].max()) + 1
        i += block.shape[1]
    return torch.from_numpy(np.concatenate(out, axis=1).astype(np.int64))


# ---- layers: their weights match the engine's storage ----------------------------------------------------------------


def _column(config, rows: int, bias: bool = False, shared: bool = True) -> tensor_parallel.ColumnParallelLinear:
    # If several share an input, the caller copies that into the tensor-parallel region once, so their backward must not
    # reduce it.
    return tensor_parallel.ColumnParallelLinear(
        config.hidden_size,
        rows,
        config=config,
        init_method=config.init_method,
        bias=bias,
        gather_output=False,
        disable_grad_reduce=shared,
    )


def _row(config, columns: int) -> tensor_parallel.RowParallelLinear:
    return tensor_parallel.RowParallelLinear(
        columns,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )


class GatedMLP(torch.nn.Module):
    """down(silu(gate(x)) · up(x)) with gate and up as two weights: each is then one slab of the engine's fused
    tensor."""

    def __init__(self, config, **unused):
        super().__init__()
        self.gate = _column(config, config.ffn_hidden_size)
        self.up = _column(config, config.ffn_hidden_size)
        self.down = _row(config, config.ffn_hidden_size)

    def forward(self, x, **unused):
        """[T, 1, hidden] -> [T, 1, hidden], None (Megatron's bias, added elsewhere)."""
        x = tensor_parallel.copy_to_tensor_model_parallel_region(x)
        out = gated_mlp(x.flatten(0, 1), self.gate, self.up, self.down).view_as(x)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(out), None


class _AllCaptured(Exception):
    """The last layer's key and value are there: nothing of a prefix is needed beyond them."""


class BoundaryAttention(torch.nn.Module):
    """Self-attention with the parameters of Megatron's: causal, and in a suffix pass a response also attends to its
    prompt's whole prefix.

    `split`: three projections in place of the fused one. Megatron's own module would interleave their outputs, take
    them apart again, and rotate in a dozen kernels.
    """

    def __init__(self, config, layer_number, split, **unused):
        super().__init__()
        self.layer_number, self.last = layer_number, layer_number == config.num_layers
        self.split, self.head_size = split, config.kv_channels
        query, kv = (n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups))
        self.ratio = query // kv
        if split:
            sizes = {"q": query, "k": kv, "v": kv}
            self.linear_qkv = torch.nn.ModuleDict({name: _column(config, n, True) for name, n in sizes.items()})
        else:
            self.linear_qkv = _column(config, query + 2 * kv, True, shared=False)
        self.linear_proj = _row(config, query)

    def forward(self, x, packed_seq_params, **unused):
        """[T, 1, hidden] -> [T, 1, hidden], None (Megatron's bias, added elsewhere).

        Raises _AllCaptured in the last layer of a prefix pass.
        """
        boundary = packed_seq_params
        query, key, value = self._projections(x)
        key, shared = rotate(key, *boundary.rotary), ()
        if boundary.runs is None:
            boundary.kv[self.layer_number] = (key, value)
            if self.last:
                raise _AllCaptured
        else:
            shared = boundary.kv[self.layer_number]
        query = rotate(query, *boundary.rotary)
        out = SharedPrefix.apply(query, key, value, boundary.sequences, boundary.runs or [], *shared)
        return self.linear_proj(out.flatten(1)[:, None])

    def _projections(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, 1, hidden] -> query [T, H, D], key and value [T, K, D]."""
        if self.split:
            x = tensor_parallel.copy_to_tensor_model_parallel_region(x)
            return tuple(self.linear_qkv[name](x)[0].view(len(x), -1, self.head_size) for name in "qkv")
        mixed = self.linear_qkv(x)[0].view(len(x), -1, (self.ratio + 2) * self.head_size)  # by group of heads
        query, key, value = mixed.split([self.ratio * self.head_size, self.head_size, self.head_size], -1)
        # Copied: views would keep all of `mixed` alive. The key is rotated, which copies it.
        return query.reshape(len(x), -1, self.head_size), key, value.contiguous()


class _Layer(TransformerLayer):
    """Megatron's layer, computed again in its backward where the boundary says so."""

    def forward(self, hidden_states, packed_seq_params, **kwargs):
        """[T, 1, hidden] -> [T, 1, hidden], None (Megatron's context)."""
        boundary, number = packed_seq_params, self.layer_number
        prefix = boundary.runs is None
        last = prefix and number == self.config.num_layers  # ends in _AllCaptured: only its norm would be kept anyway
        if not boundary.again or last or not torch.is_grad_enabled():
            return super().forward(hidden_states, packed_seq_params=boundary, **kwargs)

        # A prefix layer fills a boundary of its own: with the real one its node would hold its own outputs, for ever.
        own = replace(boundary, kv={}) if prefix else boundary

        def layer(hidden):
            out, _ = super(_Layer, self).forward(hidden, packed_seq_params=own, **kwargs)
            return (out, *own.kv.pop(number)) if prefix else (out,)

        out, *pair = Again.apply(layer, hidden_states)
        if prefix:
            boundary.kv[number] = tuple(pair)  # with a graph, which inside the layer they have not
        return out, None


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass
class Prefix:
    """The kept state of B prompts for one role: `kv` is what the suffixes read, `attached` leads into the graph."""

    samples: list  # data.Sample
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer -> leaves [tokens of all prefixes, K, D]
    attached: dict[int, tuple[torch.Tensor, torch.Tensor]] | None  # the same with a graph; None: frozen, or not kept
    last_positions: list[int]  # of each prompt's last token, which every suffix computes again

    def leaves(self) -> list[torch.Tensor]:
        """Every leaf: what the boundary holds on the device."""
        return [tensor for pair in self.kv.values() for tensor in pair]


class QwenVL(torch.nn.Module):
    """Qwen2.5-VL: a vision tower that shares out its media and a tensor-parallel language model, on the current
    Megatron parallel state.

    Parameters are allocated without values; bind() points them at memory that weights.py describes. Raises ValueError
    for float32 on a GPU.
    """

    def __init__(self, config: Qwen2_5_VLConfig, dtype: torch.dtype, qkv: str, recompute_layers: bool = False):
        super().__init__()
        require_kernels(hardware.device(), dtype)
        self.config, self.dtype, self.recompute_layers = config, dtype, recompute_layers
        self.vision = VisionTower(config.vision_config, dtype)
        self.lm = _language_model(config, dtype, qkv)
        self.tied = config.tie_word_embeddings
        self.group = parallel_state.get_tensor_model_parallel_group()
        vocab = config.text_config.vocab_size
        bias = torch.zeros(align(vocab, VOCAB_MULTIPLE))
        bias[forbidden_ids(config)] = FORBIDDEN_BIAS
        bias[vocab:] = float("-inf")  # rows that only pad the vocabulary
        self.logit_bias = bias.chunk(self.group.size())[self.group.rank()].to(
            hardware.device()
        )  # [V], this rank's rows

    def bind(self, views: dict[str, torch.Tensor], requires_grad: bool) -> None:
        """Point every parameter at `views` (name -> tensor in the parameter's shape). Raises RuntimeError on any
        mismatch."""
        named = dict(self.named_parameters())
        if named.keys() != views.keys():
            raise RuntimeError(f"model and layout disagree about parameters: {sorted(named.keys() ^ views.keys())[:8]}")
        for name, parameter in named.items():
            if parameter.shape != views[name].shape:
                raise RuntimeError(f"{name}: model {tuple(parameter.shape)}, layout {tuple(views[name].shape)}")
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, torch.nn.Parameter(views[name], requires_grad=requires_grad))

    def prefix(self, samples: list, keep: bool = True, recompute_vision: bool = False) -> Prefix:
        """Encode the media and all tokens but the last of B prompts (data.Sample); keep their K and V.

        Under torch.no_grad() (a reference) the state is detached. Otherwise prefix_backward() must be called once,
        later; with `keep` the activations stay for it, without they are dropped and computed again then; with
        `recompute_vision` of the vision tower only each block's input stays. A collective of the TP group.
        """
        trained = torch.is_grad_enabled()
        with torch.set_grad_enabled(trained and keep):
            kv, last_positions = self._prefix_kv(samples, recompute_vision)
        leaves = {layer: tuple(t.detach().requires_grad_(trained) for t in pair) for layer, pair in kv.items()}
        return Prefix(samples, leaves, kv if trained and keep else None, last_positions)

    def _prefix_kv(self, samples: list, recompute_vision: bool = False) -> tuple[dict, list[int]]:
        """Key and value of each layer, and where each prompt's last token stands."""
        lengths, ids = _prefix_ids(samples)
        places = [positions(s.input_ids.tolist(), s.grid_thw.tolist(), s.second_per_grid, self.config) for s in samples]
        pos = torch.cat([pos[:, :n] for pos, n in zip(places, lengths, strict=True)], dim=1)[:, None]  # [3, 1, T]
        sequences = Packed([n for n in lengths if n])
        boundary = Boundary(sequences, again=self.recompute_layers)
        with suppress(_AllCaptured):
            embedded = self._embed(samples, ids, self.recompute_layers or recompute_vision)
            self._decode(embedded, pos, boundary)
        if torch.is_grad_enabled() and not all(t.requires_grad for pair in boundary.kv.values() for t in pair):
            raise RuntimeError("a captured key or value has no graph: the prefix would silently get no gradient")
        return boundary.kv, [int(p[0, -1]) for p in places]

    def suffix(
        self, prefix: Prefix, responses: list[torch.Tensor], lengths: list[list[int]], temperature: float
    ) -> list[torch.Tensor]:
        """For each prompt, log-probabilities [N, S] float32 of its `responses` [N, S] int64 (N may be 0), each as long
        as `lengths` says (zeros beyond). An empty one counts as one token, whatever stands there, so that there always
        is a graph.

        They are those of the sampling distribution: log_softmax((logits + logit_bias) / temperature), over the whole
        vocabulary. A collective of the tensor-parallel group.
        """
        lengths = [[max(1, n) for n in own] for own in lengths]
        before, where, places, start = [], [], [], 0  # where: of each token in the responses end to end, with padding
        for sample, first, r, own in zip(prefix.samples, prefix.last_positions, responses, lengths, strict=True):
            before.append(F.pad(r[:, :-1], (1, 0), value=int(sample.input_ids[-1])).flatten())
            where += [torch.arange(start + i * r.shape[1], start + i * r.shape[1] + n) for i, n in enumerate(own)]
            places += [torch.arange(first, first + n) for n in own]
            start += r.numel()
        where, pos = hardware.upload(torch.cat(where)), torch.cat(places).expand(3, 1, -1)  # [T], [3, 1, T]
        tokens, targets = torch.cat(before)[where], torch.cat([r.flatten() for r in responses])[where]
        kept = [len(sample.input_ids) - 1 for sample in prefix.samples]
        boundary = suffix_boundary(prefix.kv, kept, lengths, self.recompute_layers)
        hidden = self._decode(self.lm.embedding(tokens[None], None), pos, boundary)  # [T, 1, hidden]
        weight = self.lm.shared_embedding_or_output_weight() if self.tied else None
        logits, _ = self.lm.output_layer(hidden, weight=weight)  # [T, 1, V]
        logprobs = TargetLogprobs.apply(logits.squeeze(1), targets, self.logit_bias, float(temperature), self.group)
        whole = logprobs.new_zeros(start).index_copy(0, where, logprobs)
        parts = whole.split([r.numel() for r in responses])
        return [part.view(r.shape) for part, r in zip(parts, responses, strict=True)]

    def prefix_backward(self, prefix: Prefix) -> None:
        """Send the gradients that the suffixes left at the boundary through the prefix, the projector and the vision
        tower. Once for all prompts of `prefix`.
        """
        attached = self._prefix_kv(prefix.samples)[0] if prefix.attached is None else prefix.attached
        tensors = [tensor for pair in attached.values() for tensor in pair]
        # A leaf has none if every response was masked, or no prompt has a prefix.
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in prefix.leaves()]
        torch.autograd.backward(tensors, gradients)
        prefix.kv, prefix.attached = {}, None

    def _embed(self, samples: list, ids: torch.Tensor, recompute_vision: bool = False) -> torch.Tensor:
        """Embeddings [T, 1, hidden] of the prefixes' tokens, with the media's features in place of their
        placeholders."""
        visual = (ids == self.config.video_token_id) | (ids == self.config.image_token_id)
        rows = visual.nonzero()[:, 0]  # prompt by prompt, as the features come
        media = [medium for sample in samples for medium in sample.media]
        count = sum(sample.visual_tokens for sample in samples)
        if len(rows) != count:
            raise RuntimeError(f"{len(rows)} visual placeholders in the prompts, {count} features")
        embedded = self.lm.embedding(hardware.upload(ids)[None], None)
        if not count:
            return embedded
        own, lengths = self.vision.share(media, recompute_vision)
        return WithMedia.apply(embedded.squeeze(1), own, hardware.upload(rows), lengths)[:, None]

    def _decode(self, embedded: torch.Tensor, pos: torch.Tensor, boundary: Boundary) -> torch.Tensor:
        """[T, 1, hidden], positions [3, 1, T] -> hidden states [T, 1, hidden] after the final norm."""
        angles = self.lm.rotary_pos_emb(hardware.upload(pos), self.lm.mrope_section).squeeze(1)
        angles = angles[..., : angles.shape[-1] // 2]  # the second half repeats the first
        boundary.rotary = angles.cos(), angles.sin()
        return self.lm.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=boundary)


def _prefix_ids(samples: list) -> tuple[list[int], torch.Tensor]:
    """How many tokens each prompt's prefix has, and all of them on the CPU."""
    lengths = [len(sample.input_ids) - 1 for sample in samples]
    if not any(lengths):
        lengths[0] = 1  # nobody attends to it
    return lengths, torch.cat([sample.input_ids[:n] for sample, n in zip(samples, lengths, strict=True)])


def _language_model(config: Qwen2_5_VLConfig, dtype: torch.dtype, qkv: str) -> GPTModel:
    text = config.text_config
    megatron = TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        ffn_hidden_size=text.intermediate_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=list(text.rope_parameters["mrope_section"]),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,  # and no values: bind() replaces every parameter
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.module = _Layer
    spec.submodules.self_attention = ModuleSpec(BoundaryAttention, params={"split": qkv == "split"})
    spec.submodules.mlp = GatedMLP
    return GPTModel(
        megatron,
        spec,
        vocab_size=align(text.vocab_size, VOCAB_MULTIPLE),
        max_sequence_length=text.max_position_embeddings,
        position_embedding_type="mrope",
        rotary_base=text.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=True,
    )


def _main() -> None:
    """Forward and backward of one prompt with N responses, prefix shared and not shared."""
    import time
    from types import SimpleNamespace

    import configs
    import weights

    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    hardware.select_device(int(os.environ["LOCAL_RANK"]))
    hardware.answer_cuda_queries()
    dist.init_process_group(hardware.backend())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    config, n, s = configs.load_config("tiny"), 8, 32
    dtype = torch.bfloat16 if hardware.device().type == "cuda" else torch.float32
    plan = weights.layout(config, dist.get_world_size(), 1, "split", dtype)
    arena = Arena({"snapshot": plan.nbytes})
    snapshot = weights.Snapshot(plan, dist.get_rank(), arena.acquire("snapshot"), None, dist.group.WORLD)
    weights.init_random(snapshot, 0, config)
    model = QwenVL(config, dtype, "split")
    model.bind({shard.name: shard.parameter(snapshot.flat(shard)) for shard in snapshot.shards}, requires_grad=True)
    text = torch.randint(60, 300, (400,))
    prompt = SimpleNamespace(input_ids=text, grid_thw=torch.zeros(0, 3), second_per_grid=[], media=[], visual_tokens=0)
    responses = torch.randint(60, 300, (n, s), device=hardware.device())
    for groups in ([responses], [row[None] for row in responses]):  # one prefix for all, or one for each
        start = time.perf_counter()
        for own in groups:
            prefix = model.prefix([prompt])
            model.suffix(prefix, [own], [[s] * len(own)], 1.0)[0].sum().backward()
            model.prefix_backward(prefix)
        hardware.synchronize()
        if dist.get_rank() == 0:
            took_ms = (time.perf_counter() - start) * 1e3
            print(f"{len(groups)} prefixes of {len(text)} tokens, {n} responses of {s}: {took_ms:.0f} ms")
    dist.destroy_process_group()


_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29503"}

if __name__ == "__main__":
    _main()

"""Weights: one physical copy of the actor that the trainer and the engine read at different tensor-parallel degrees.

    rollout shard of one GPU = the snapshot (rollout TP 1, train TP 2: q = 2)

      column-parallel [out, in]          row-parallel, stored [in, out]           fused QKV
    ┌───────────┐ ◄ rank 0's slab      ┌───────────┐ ◄ rank 0's slab         Q ┌──┬──┐
    │  slab 0   │                      │  slab 0   │   (shown to both           └──┴──┘   each rank permutes its
    ├───────────┤ ◄ rank 1's slab      ├───────────┤    engines as .t())     K ┌──┬──┐   own [q k v | q k v | …]
    │  slab 1   │                      │  slab 1   │                           └──┴──┘   into its three slabs
    └───────────┘                      └───────────┘                         V ┌──┬──┐
       Case 1: alias                      Case 2: alias, transposed storage    └──┴──┘   Case 3: copy and permute

Every sharded tensor is stored so that its sharded axis comes first. A training shard is then always a contiguous slab,
and publishing θk+1 is the same for every tensor: each rank of a group of q = train_tp / rollout_tp owns one slab in its
own GPU's snapshot and gathers the other q − 1. Replicated tensors (norms, vision tower) are whole on every GPU and need
no exchange.

Megatron fuses Q, K and V interleaved by head group where vLLM wants all Q, then all K, then all V. No view makes the
two equal (Rollplex §3.3), so the trainer keeps its own fused tensor and permutes it into the snapshot after an update.
`--qkv split` gives the trainer three separate weights instead: then everything is Case 1 or 2 and nothing is stored
twice.

Run:
    python weights.py --model qwen2.5-vl-32b --train-tp 8 --rollout-tp 4     # layout coverage, no weights needed
Left out on purpose: quantised weights, expert parallelism, more key/value shards than heads.
To share another layout, add its tensors to table(); to add a model family, add its names there as well.
"""

import functools
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

import hardware
from arena import align

VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary to this; the trainer uses the same rows so that the shards coincide


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logical:
    """One tensor of the model and the name each side has for it. Shapes are logical: [out, in], vocabulary padded."""

    hf: str  # name in a published checkpoint
    shape: tuple[int, ...]
    axis: int | None  # tensor-parallel axis: 0 column-parallel, 1 row-parallel, None replicated
    vllm: str  # engine parameter that contains it (q, k, v share one, gate and up share one)
    train: str  # trainer parameter that contains it
    case: int  # 1 alias, 2 alias in transposed storage, 3 separate copy, permuted


def table(config, qkv: str = "fused") -> list[Logical]:
    """All tensors of a Qwen2.5-VL `config` (transformers), those of one engine parameter adjacent and in its order."""
    text = config.text_config
    hidden, inner, head = text.hidden_size, text.intermediate_size, text.hidden_size // text.num_attention_heads
    query, kv = text.num_attention_heads * head, text.num_key_value_heads * head
    vocab = align(text.vocab_size, VOCAB_MULTIPLE)
    rows: list[Logical] = []

    def add(hf: str, shape: tuple[int, ...], axis: int | None, vllm: str, train: str, case: int = 1) -> None:
        rows.append(Logical(hf, shape, axis, f"language_model.{vllm}", f"lm.{train}", case))

    add(
        "model.embed_tokens.weight", (vocab, hidden), 0, "model.embed_tokens.weight", "embedding.word_embeddings.weight"
    )
    for i in range(text.num_hidden_layers):
        layer, train = f"model.layers.{i}.", f"decoder.layers.{i}."
        add(
            f"{layer}input_layernorm.weight",
            (hidden,),
            None,
            f"{layer}input_layernorm.weight",
            f"{train}input_layernorm.weight",
        )
        for kind in ("weight", "bias"):
            for part, size in (("q", query), ("k", kv), ("v", kv)):
                add(
                    f"{layer}self_attn.{part}_proj.{kind}",
                    (size, hidden) if kind == "weight" else (size,),
                    0,
                    f"{layer}self_attn.qkv_proj.{kind}",
                    f"{train}self_attention.linear_qkv.{kind if qkv == 'fused' else f'{part}.{kind}'}",
                    3 if qkv == "fused" else 1,
                )
        attn_out, down = "self_attn.o_proj.weight", "mlp.down_proj.weight"
        add(layer + attn_out, (hidden, query), 1, layer + attn_out, f"{train}self_attention.linear_proj.weight", 2)
        norm = "post_attention_layernorm.weight"
        add(layer + norm, (hidden,), None, layer + norm, f"{train}pre_mlp_layernorm.weight")
        for part in ("gate", "up"):
            fused = f"{layer}mlp.gate_up_proj.weight"
            add(f"{layer}mlp.{part}_proj.weight", (inner, hidden), 0, fused, f"{train}mlp.{part}.weight")
        add(layer + down, (hidden, inner), 1, layer + down, f"{train}mlp.down.weight", 2)
    add("model.norm.weight", (hidden,), None, "model.norm.weight", "decoder.final_layernorm.weight")
    if not config.tie_word_embeddings:
        add("lm_head.weight", (vocab, hidden), 0, "lm_head.weight", "output_layer.weight")
    return rows + _vision_table(config)


def _vision_table(config) -> list[Logical]:
    shapes = _vision_shapes(config.vision_config.to_json_string(use_diff=False))
    # The engine fuses gate and up; put each pair next to each other (weights, then biases).
    order = sorted(shapes, key=lambda name: (_fused_gate_up(name), "up_proj" in name))
    return [Logical(f"visual.{n}", shapes[n], None, f"visual.{_fused_gate_up(n)}", f"vision.{n}", 1) for n in order]


@functools.lru_cache
def _vision_shapes(vision_config: str) -> dict[str, tuple[int, ...]]:
    """Of transformers' tower with this configuration (JSON), made once: the planner lays out dozens of plans."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionConfig,
    )

    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**json.loads(vision_config)))
    return {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}


def _fused_gate_up(name: str) -> str:
    return name.replace("gate_proj", "gate_up_proj") if "gate_proj" in name else name.replace("up_proj", "gate_up_proj")


# ---- the layout of one rollout rank's snapshot -----------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where one logical tensor's rollout shard lies in the snapshot: `storage` is contiguous, its sharded axis
    first."""

    logical: Logical
    offset: int  # bytes from the start of the snapshot
    storage: tuple[int, ...]

    def tensor(self, snapshot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The slot's storage inside `snapshot` (uint8), shape `storage`."""
        nbytes = math.prod(self.storage) * dtype.itemsize
        return snapshot[self.offset : self.offset + nbytes].view(dtype).view(self.storage)


@dataclass(frozen=True)
class Layout:
    """The snapshot every rollout rank has: same offsets everywhere, the contents depend on the rank."""

    slots: tuple[Slot, ...]
    nbytes: int
    train_tp: int
    rollout_tp: int
    dtype: torch.dtype
    groups: int  # key/value head groups of the whole model
    head_size: int
    vocab_size: int  # rows of the vocabulary that are real; the rest is padding

    @property
    def rows(self) -> list[Logical]:
        """The table that this layout places."""
        return [slot.logical for slot in self.slots]

    @property
    def q(self) -> int:
        """Training shards per rollout shard."""
        return self.train_tp // self.rollout_tp


def layout(config, train_tp: int, rollout_tp: int, qkv: str, dtype: torch.dtype) -> Layout:
    """Place every tensor's rollout shard. Raises ValueError naming the field where the degrees do not divide the
    model."""
    check_degrees(config, train_tp, rollout_tp, qkv)
    slots, offset, previous = [], 0, None
    for row in table(config, qkv):
        if row.vllm != previous:  # parts of one engine parameter stay contiguous
            offset = align(offset)
        previous = row.vllm
        storage = row.shape if row.axis != 1 else row.shape[::-1]
        if row.axis is not None:
            storage = (storage[0] // rollout_tp, *storage[1:])
        slots.append(Slot(row, offset, storage))
        offset += math.prod(storage) * dtype.itemsize
    text = config.text_config
    head = text.hidden_size // text.num_attention_heads
    return Layout(
        tuple(slots), align(offset), train_tp, rollout_tp, dtype, text.num_key_value_heads, head, text.vocab_size
    )


def check_degrees(config, train_tp: int, rollout_tp: int, qkv: str) -> None:
    """Raise ValueError, naming the field, where the tensor-parallel degrees do not divide the model or each other."""
    if qkv not in ("fused", "split"):
        raise ValueError(f"--qkv {qkv}: expected fused or split")
    if train_tp < 1 or rollout_tp < 1 or train_tp % rollout_tp:
        raise ValueError(
            f"--train-tp {train_tp} must be a positive multiple of --rollout-tp {rollout_tp}: "
            "several training shards make up one rollout shard"
        )
    text = config.text_config
    for name, size in (
        ("key/value heads", text.num_key_value_heads),
        ("attention heads", text.num_attention_heads),
        ("MLP columns", text.intermediate_size),
        ("padded vocabulary rows", align(text.vocab_size, VOCAB_MULTIPLE)),
    ):
        if size % train_tp:
            raise ValueError(
                f"--train-tp {train_tp} does not divide the model's {size} {name}; choose a divisor of {size}"
            )


# ---- the trainer's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One trainer parameter on one rank: `storage` is its contiguous memory, the parameter is its .t() where
    transposed."""

    name: str
    storage: tuple[int, ...]
    transposed: bool
    replicated: bool
    case: int
    offset: int  # bytes from the start of the snapshot, or of the fused region for Case 3

    def flat(self, snapshot: torch.Tensor, fused: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The shard's memory, 1-D, in storage order."""
        region = fused if self.case == 3 else snapshot
        return region[self.offset : self.offset + math.prod(self.storage) * dtype.itemsize].view(dtype)

    def parameter(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat` (any dtype) in the parameter's logical shape."""
        tensor = flat.view(self.storage)
        return tensor.t() if self.transposed else tensor


def shards(plan: Layout, tp_rank: int) -> list[Shard]:
    """Every trainer parameter of `tp_rank`, in table order; each exactly once."""
    out, fused_offset = [], 0
    for names in _by_train_parameter(plan):
        first = names[0]
        if first.logical.case == 3:
            rows = sum(slot.storage[0] for slot in names) // plan.q
            storage = (rows, *first.storage[1:])
            out.append(Shard(first.logical.train, storage, False, False, 3, fused_offset))
            fused_offset += align(math.prod(storage) * plan.dtype.itemsize)
            continue
        slot, replicated = first, first.logical.axis is None
        storage = slot.storage if replicated else (slot.storage[0] // plan.q, *slot.storage[1:])
        skip = 0 if replicated else (tp_rank % plan.q) * math.prod(storage) * plan.dtype.itemsize
        out.append(
            Shard(
                slot.logical.train, storage, slot.logical.axis == 1, replicated, slot.logical.case, slot.offset + skip
            )
        )
    return out


def fused_nbytes(plan: Layout) -> int:
    """Bytes of the Case-3 region: the trainer's own copy of what it stores in another order."""
    sizes = [shard.storage for shard in shards(plan, 0) if shard.case == 3]
    return sum(align(math.prod(storage) * plan.dtype.itemsize) for storage in sizes)


def _by_train_parameter(plan: Layout) -> Iterator[list[Slot]]:
    """Slots grouped by the trainer parameter they belong to: three for a fused QKV, else one."""
    groups: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        groups.setdefault(slot.logical.train, []).append(slot)
    yield from groups.values()


class Snapshot:
    """One rank's view of the weights: its parameters to write, and publish() to make every engine's shard complete.

    Shapes follow the trainer's parameters; all collectives run in `group`, the q ranks whose shards form this rollout
    shard. `copy` (uint8 [nbytes]) is for an engine that does not share: it becomes equal to the snapshot at each
    publication."""

    def __init__(
        self,
        plan: Layout,
        tp_rank: int,
        snapshot: torch.Tensor,
        fused: torch.Tensor | None,
        group=None,
        copy: torch.Tensor | None = None,
    ):
        self.copy = copy
        self.plan, self.tp_rank, self.bytes, self.fused, self.group = plan, tp_rank, snapshot, fused, group
        self.shards = shards(plan, tp_rank)
        self._fused_parts = {parts[0].logical.train: parts for parts in _by_train_parameter(plan) if len(parts) == 3}

    def flat(self, shard: Shard) -> torch.Tensor:
        return shard.flat(self.bytes, self.fused, self.plan.dtype)

    def slab(self, slot: Slot) -> torch.Tensor:
        """This rank's part of a sharded slot, a contiguous view."""
        rows = slot.storage[0] // self.plan.q
        start = (self.tp_rank % self.plan.q) * rows
        return slot.tensor(self.bytes, self.plan.dtype)[start : start + rows]

    def publish(self) -> None:
        """Make θk+1 complete on this GPU: reconstruct Case 3, then gather the other q − 1 slabs of every tensor.

        A collective of the group. Call it only when no engine can be reading (barrier 3).
        """
        self.reconstruct()
        self.exchange()
        self.copy_out()
        hardware.synchronize()

    def copy_out(self) -> None:
        """Bring an unshared engine's copy up to date; nothing to do where the engine reads the snapshot itself."""
        if self.copy is not None:
            self.copy.copy_(self.bytes)

    def reconstruct(self) -> None:
        """Case 3: permute the trainer's interleaved groups into this rank's Q, K and V slabs."""
        for slab, rows in self._case3():
            slab.copy_(rows)

    def fuse(self) -> None:
        """Case 3, the other way, for freshly loaded weights: this rank's Q, K and V slabs into the trainer's order."""
        for slab, rows in self._case3():
            rows.copy_(slab)

    def _case3(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same numbers in both orders: a Q, K or V slab of the snapshot, and its rows in the trainer's tensor."""
        for shard in self.shards:
            if shard.case == 3:
                split = _split_groups(shard.parameter(self.flat(shard)), self.plan)
                for slot, rows in zip(self._fused_parts[shard.name], split, strict=True):
                    yield self.slab(slot).view(rows.shape), rows

    def exchange(self) -> None:
        """Gather every sharded slot in place; each rank contributes the slab it owns. A collective of the group."""
        if self.plan.q == 1:
            return
        for slot in self.plan.slots:
            if slot.logical.axis is not None:
                whole = slot.tensor(self.bytes, self.plan.dtype)
                dist.all_gather_into_tensor(
                    whole, self.slab(slot), group=self.group
                )  # in place: no copy of the own slab


def _split_groups(interleaved: torch.Tensor, plan: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a training shard [groups·(r+2)·D, …] as Q [groups, r·D, …], K and V [groups, D, …]; r = query heads a
    group."""
    groups = plan.groups // plan.train_tp
    by_group = interleaved.view(groups, -1, *interleaved.shape[1:])
    width = by_group.shape[1] - 2 * plan.head_size
    return by_group.split([width, plan.head_size, plan.head_size], dim=1)


# ---- the engine's side -----------------------------------------------------------------------------------------------


def engine_views(snapshot: torch.Tensor, plan: Layout) -> dict[str, torch.Tensor]:
    """Every engine parameter as a view of the snapshot, in the engine's logical orientation."""
    parts: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        parts.setdefault(slot.logical.vllm, []).append(slot)
    views = {}
    for name, slots in parts.items():
        rows = sum(slot.storage[0] for slot in slots)
        whole = Slot(slots[0].logical, slots[0].offset, (rows, *slots[0].storage[1:])).tensor(snapshot, plan.dtype)
        views[name] = whole.t() if slots[0].logical.axis == 1 else whole
    return views


def bind_engine(model: torch.nn.Module, snapshot: torch.Tensor, plan: Layout) -> int:
    """Point every parameter of a vLLM `model` into `snapshot`; returns how many.

    Raises RuntimeError if the two sides disagree about a name or a shape: a parameter left outside would silently go
    stale. On a CPU, vLLM would afterwards pre-pack each linear weight into a private copy, so those layers get a method
    that does not."""
    views = engine_views(snapshot, plan)
    named = dict(model.named_parameters())
    if named.keys() != views.keys():
        raise RuntimeError(f"engine and layout disagree about parameters: {sorted(named.keys() ^ views.keys())[:8]}")
    for name, parameter in named.items():
        if parameter.shape != views[name].shape:
            raise RuntimeError(
                f"engine parameter {name} has shape {tuple(parameter.shape)}, layout {tuple(views[name].shape)}"
            )
        _place(parameter, views[name])
    if snapshot.device.type == "cpu":
        _keep_weights_in_place(model)
    return len(named)


def _place(parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Put `view` behind `parameter`, which stays the same object (tied modules hold it) with its class and attributes.

    Assigning .data would do, were it not that a parameter without memory is on another device, "meta"."""
    placed = torch.nn.Parameter(view, requires_grad=parameter.requires_grad)
    placed.__class__, placed.__dict__ = parameter.__class__, parameter.__dict__
    torch.utils.swap_tensors(parameter, placed)


def _keep_weights_in_place(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class InPlaceLinear(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer) -> None:
            pass

        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, layer.weight, bias)

    class InPlaceEmbedding(UnquantizedEmbeddingMethod):
        process_weights_after_loading = InPlaceLinear.process_weights_after_loading
        apply = InPlaceLinear.apply

    replacement = {UnquantizedLinearMethod: InPlaceLinear, UnquantizedEmbeddingMethod: InPlaceEmbedding}
    for module in model.modules():
        if (method := type(getattr(module, "quant_method", None))) in replacement:
            module.quant_method = replacement[method]()


# ---- initial values, checkpoints -------------------------------------------------------------------------------------


def init_random(snapshot: Snapshot, seed: int, config) -> None:
    """Fill this rank's rollout shard: normal matrices, unit norms, zero biases; the same model at every TP degree.

    The standard deviations are `config`'s initializer ranges, of the text and of the vision part.
    """
    device = snapshot.bytes.device
    for slot in snapshot.plan.slots:
        name, shape = slot.logical.hf, _published_shape(slot, snapshot.plan)
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        if len(shape) > 1:
            part = config.vision_config if name.startswith("visual.") else config.text_config
            whole = torch.randn(shape, generator=generator, device=device) * part.initializer_range
        else:
            whole = (torch.zeros if name.endswith("bias") else torch.ones)(shape)
        _fill(snapshot, slot, whole[_rows(snapshot, slot)])
    snapshot.fuse()


def load_hf(snapshot: Snapshot, directory: str | Path) -> None:
    """Fill this rank's rollout shard from the safetensors of a Hugging Face directory, reading only the rows it
    needs."""
    files = _index(Path(directory))
    for slot in snapshot.plan.slots:
        if (found := files.get(slot.logical.hf)) is None:
            raise ValueError(f"--model {directory}: no tensor {slot.logical.hf!r} in its safetensors")
        path, key = found
        with safe_open(path, "pt") as file:
            view = file.get_slice(key)
            expected = _published_shape(slot, snapshot.plan)
            if tuple(view.get_shape()) != expected:
                raise ValueError(
                    f"--model {directory}: {key} has shape {tuple(view.get_shape())}, its config.json says {expected}"
                )
            _fill(snapshot, slot, view[_rows(snapshot, slot)])
    snapshot.fuse()


def _published_shape(slot: Slot, plan: Layout) -> tuple[int, ...]:
    """The tensor's shape in a checkpoint: without the rows that pad the vocabulary."""
    vocab = slot.logical.hf in ("model.embed_tokens.weight", "lm_head.weight")
    return (plan.vocab_size, *slot.logical.shape[1:]) if vocab else slot.logical.shape


def _rows(snapshot: Snapshot, slot: Slot) -> slice:
    """Rows of the published tensor that belong to this rank's rollout shard; all of them unless it is
    column-parallel."""
    if slot.logical.axis != 0:
        return slice(None)
    per_shard, available = slot.storage[0], _published_shape(slot, snapshot.plan)[0]
    start = (snapshot.tp_rank // snapshot.plan.q) * per_shard
    return slice(min(start, available), min(start + per_shard, available))


def _fill(snapshot: Snapshot, slot: Slot, values: torch.Tensor) -> None:
    """Write `values` (logical orientation; rows already chosen for column-parallel tensors) into the slot; padding is
    zero."""
    storage = slot.tensor(snapshot.bytes, snapshot.plan.dtype)
    if slot.logical.axis == 1:
        start = (snapshot.tp_rank // snapshot.plan.q) * storage.shape[0]
        values = values[:, start : start + storage.shape[0]].t()
    storage[: values.shape[0]].copy_(values)
    storage[values.shape[0] :].zero_()


def _index(directory: Path) -> dict[str, tuple[Path, str]]:
    """Published name -> (file, key in it), for both naming generations of transformers."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--model {directory}: no *.safetensors there; pass --weights random to start without weights")
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name = key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
                found[name] = (path, key)
    return found


def export_hf(
    snapshot: Snapshot, source: str | Path, target: str | Path, tp_group=None, shard_bytes: int = 4 << 30
) -> None:
    """Write the published model as a directory that transformers loads; config and tokenizer are copied from `source`.

    A collective of the `tp_group`; rank 0 writes. The directory appears under its name only when complete.
    """
    target, rank, plan = Path(target), snapshot.tp_rank, snapshot.plan
    partial = target.with_name(target.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    pending: dict[str, torch.Tensor] = {}
    written: list[list[str]] = []
    for slot in plan.slots:
        whole = _gather(snapshot, slot, tp_group)
        if rank:
            continue
        pending[slot.logical.hf] = whole[: _published_shape(slot, plan)[0]].cpu().contiguous()
        if sum(t.nbytes for t in pending.values()) >= shard_bytes or slot is plan.slots[-1]:
            written.append(list(pending))
            save_file(pending, partial / f"model-{len(written):05d}.safetensors", metadata={"format": "pt"})
            pending = {}
    if rank == 0:
        _finish_export(partial, target, Path(source), written, plan.dtype)
    if dist.is_initialized():
        dist.barrier(group=tp_group)


def _gather(snapshot: Snapshot, slot: Slot, tp_group) -> torch.Tensor:
    """One whole logical tensor, assembled from the ranks' slabs (a clone, logical orientation)."""
    if slot.logical.axis is None:
        return slot.tensor(snapshot.bytes, snapshot.plan.dtype).clone()
    slab = snapshot.slab(slot)
    if snapshot.plan.train_tp == 1:
        whole = slab.clone()
    else:
        pieces = [torch.empty_like(slab) for _ in range(snapshot.plan.train_tp)]
        dist.all_gather(pieces, slab, group=tp_group)
        whole = torch.cat(pieces)
    return whole.t() if slot.logical.axis == 1 else whole


def _finish_export(partial: Path, target: Path, source: Path, written: list[list[str]], dtype: torch.dtype) -> None:
    names = [f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
    for i, name in enumerate(names):
        (partial / f"model-{i + 1:05d}.safetensors").rename(partial / name)
    weight_map = {key: name for name, keys in zip(names, written, strict=True) for key in keys}
    index = {"metadata": {"total_size": sum(p.stat().st_size for p in partial.iterdir())}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


# ---- coverage --------------------------------------------------------------------------------------------------------


def coverage(rows: list[Logical]) -> dict[int, int]:
    """Parameters per case, over the whole model."""
    return {case: sum(math.prod(row.shape) for row in rows if row.case == case) for case in (1, 2, 3)}


@dataclass(frozen=True)
class _Demo:
    model: str = "qwen2.5-vl-32b"
    """Named configuration or a model directory."""
    train_tp: int = 8
    """Training tensor-parallel degree."""
    rollout_tp: int = 4
    """Rollout tensor-parallel degree; divides train_tp."""
    qkv: str = "fused"
    """fused (Megatron's interleaved QKV, Case 3) or split (three weights, all shared)."""


def _main(args: _Demo) -> None:
    from configs import load_config

    config = load_config(args.model)
    plan = layout(config, args.train_tp, args.rollout_tp, args.qkv, torch.bfloat16)
    print(f"{args.model}, train TP {args.train_tp}, rollout TP {args.rollout_tp}, q = {plan.q}, --qkv {args.qkv}")
    rows = table(config, args.qkv)
    language = [row for row in rows if not row.hf.startswith("visual.")]
    for title, part in (("language model", language), ("with the vision tower", rows)):
        counts = coverage(part)
        total = sum(counts.values())
        print(f"{title}: {total / 1e9:.2f} B parameters")
        for case, text in ((1, "same axis and order"), (2, "transposed storage"), (3, "permuted copy")):
            print(f"  Case {case}  {text:20s} {counts[case] / 1e9:6.2f} B  {100 * counts[case] / total:5.1f} %")
    case3 = sum(math.prod(slot.storage) for slot in plan.slots if slot.logical.case == 3) * plan.dtype.itemsize
    print(
        f"  BF16 snapshot {plan.nbytes / 2**30:.2f} GiB per GPU, of it {case3 / 2**30:.2f} GiB Case-3 inference layout;"
    )
    print(f"  the trainer's own fused QKV takes {fused_nbytes(plan) / 2**30:.2f} GiB beside it")


if __name__ == "__main__":
    import tyro

    _main(tyro.cli(_Demo, description=__doc__.split("\n\n")[0]))

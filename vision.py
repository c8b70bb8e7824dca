"""Vision tower: Qwen2.5-VL's encoder and projector, pixels to features that take the place of prompt tokens.

    frames (uint8) ─► patches ─► [norm, attention, norm, gated MLP] × depth ─► norm, 2 × 2 patches merged ─► features
                                  └ within a window of 112 × 112 pixels; in a few blocks within a whole slice

A slice is one step of a clip's time (two frames) or an image; nothing attends across slices. So the ranks of a replica,
each of which holds the whole tower, share out the slices of the media and gather the features. A rank's gradient of the
tower is then only its share: is_partial() names these parameters, and optimizer.py adds the shares up.

Patches are put in the order of their windows once, before the first block, so that a window is a run of rows.

Names and shapes of parameters are transformers' (weights.py loads and exports them); the computation is ours because
that of transformers waits for the device several times a pass, rotates and normalises in many small FP32 steps, and
multiplies matrices whose width of 3420 misses the tensor cores' fast paths.

Run: python vision.py                     # CPU or GPU: time and saved bytes, ours and transformers'
Left out on purpose: tensor parallelism (the tower is whole on every rank), other families' encoders.
To change what is attended to, edit places(); to change what a block computes, edit Block.
"""

import functools
from collections import Counter
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import hardware
from data import TEMPORAL, Media, patchify
from layers import Again, Packed, gated_mlp, rotate, time_and_bytes

# s patches of all media, H heads, D head size, m the side of what is merged (2 patches), [.., 3] grids t × h × w.


class Places(NamedTuple):
    """Where the patches of some grids stand."""

    order: torch.Tensor  # [s / m²] int64: tokens (m × m patches) by window
    back: torch.Tensor  # [s / m²] int64: its inverse
    yx: torch.Tensor  # [s, 2] float32: row and column of each patch, in window order
    windows: tuple[int, ...]  # patches of each window
    slices: tuple[int, ...]  # patches of each slice


@functools.lru_cache(maxsize=256)
def places(grids: tuple[tuple[int, int, int], ...], merge: int, window: int) -> Places:
    """For media of these grids (patches), with windows of `window` tokens a side. On the CPU."""
    order, yx, windows, slices, start = [], [], [], [], 0
    for t, h, w in grids:
        rows, columns = torch.arange(h // merge)[:, None], torch.arange(w // merge)
        across = -(-len(columns) // window)
        own = (rows // window * across + columns // window).flatten()  # window of each token of a slice
        tokens = own.argsort(stable=True)
        patch = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        patch = patch.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(len(own), -1, 2)
        for i in range(t):
            order.append(tokens + start + i * len(own))
            yx.append(patch[tokens].view(-1, 2))
        windows += (own.bincount() * merge**2).tolist() * t
        slices += [h * w] * t
        start += t * len(own)
    whole = torch.cat(order)
    return Places(whole, whole.argsort(), torch.cat(yx).float(), tuple(windows), tuple(slices))


# ---- the media, shared out over the ranks of a replica ---------------------------------------------------------------


def is_partial(name: str) -> bool:
    """Whether a rank's gradient of this parameter is only its share, to be summed over the tensor-parallel group."""
    return name.startswith("vision.")


def share_out(grid: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Cut the temporal slices of media [[t, h, w], ...] into a part for each rank, again as media: contiguous, and as
    equal in patches as whole slices can be. A slice goes to the rank in whose equal share of the patches its middle
    lies; with fewer slices than ranks, some get none."""
    total, before = sum(t * h * w for t, h, w in grid), 0
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for t, h, w in grid:
        middles = (2 * (before + i * h * w) + h * w for i in range(t))  # doubled, to stay whole
        for rank, own in Counter(middle * ranks // (2 * total) for middle in middles).items():
            parts[rank].append([own, h, w])
        before += t * h * w
    return parts


class WithMedia(torch.autograd.Function):
    """Token embeddings with all ranks' features in the places of the media.

    Backward, a rank takes the gradient of its own features and needs no other rank: the language model's input is the
    same on all of them, and the gradient there is whole. Nothing but the places is saved, and nothing waits for the
    device (masked_scatter's backward would).
    """

    @staticmethod
    def forward(ctx, embedded, own, rows, lengths):
        """embedded [tokens, hidden], own features [lengths[rank], hidden], rows [sum(lengths)]: where all ranks'
        features belong -> [tokens, hidden]. A collective of the tensor-parallel group."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        ctx.own = slice(start := sum(lengths[:rank]), start + lengths[rank])
        ctx.save_for_backward(rows)
        return embedded.index_copy(0, rows, _gathered(own, lengths).to(embedded.dtype))

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return grad.index_fill(0, rows, 0), grad.index_select(0, rows[ctx.own]), None, None


def _gathered(own: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[lengths[rank], hidden] of each rank -> [sum(lengths), hidden], in one piece padded to the longest. A collective
    of the tensor-parallel group."""
    if len(lengths) == 1:
        return own
    everyone = own.new_empty(len(lengths), max(lengths), own.shape[1])
    padded = F.pad(own, (0, 0, 0, max(lengths) - len(own)))
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather_into_tensor(everyone.flatten(0, 1), padded.contiguous(), group=group)
    return torch.cat([part[:n] for part, n in zip(everyone, lengths, strict=True)])


def _patches(media: list[Media], first: int, count: int) -> torch.Tensor:
    """[patches, 1176] float32 of `count` temporal slices of all media, from the `first`: only their frames travel to
    the device, as bytes, and become patches there."""
    parts = []
    for medium in media:
        frames = medium.frames[TEMPORAL * max(0, first) : TEMPORAL * max(0, first + count)]
        parts += [patchify(hardware.upload(torch.from_numpy(frames)))] if len(frames) else []
        first -= medium.grid[0]
    return torch.cat(parts)


# ---- the tower -------------------------------------------------------------------------------------------------------


class VisionTower(nn.Module):
    """config: transformers' Qwen2_5_VLVisionConfig. Parameters are on the meta device until they are bound."""

    def __init__(self, config, dtype: torch.dtype):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.merged = hidden * config.spatial_merge_size**2
        with torch.device("meta"):
            self.patch_embed = nn.Module()
            patch = config.temporal_patch_size, config.patch_size, config.patch_size
            self.patch_embed.proj = nn.Conv3d(config.in_channels, hidden, patch, bias=False, dtype=dtype)
            self.blocks = nn.ModuleList(Block(config, dtype) for _ in range(config.depth))
            self.merger = nn.Module()
            self.merger.ln_q = nn.RMSNorm(hidden, eps=1e-6, dtype=dtype)
            first = nn.Linear(self.merged, self.merged, dtype=dtype)
            self.merger.mlp = nn.Sequential(
                first, nn.GELU(), nn.Linear(self.merged, config.out_hidden_size, dtype=dtype)
            )

    def share(self, media: list[Media], again: bool = False) -> tuple[torch.Tensor, list[int]]:
        """This rank's share [visual tokens, hidden] of the media's features, and how many tokens each rank's share
        has. With `again`, backward keeps only each block's input and computes the block a second time."""
        rank, merged = parallel_state.get_tensor_model_parallel_rank(), self.config.spatial_merge_size**2
        parts = share_out([medium.grid for medium in media], parallel_state.get_tensor_model_parallel_world_size())
        lengths = [sum(t * h * w for t, h, w in part) // merged for part in parts]
        if not parts[rank]:
            return self.patch_embed.proj.weight.new_empty(0, self.config.out_hidden_size), lengths
        slices = [sum(t for t, _, _ in part) for part in parts]
        pixels = _patches(media, sum(slices[:rank]), slices[rank])
        return self(pixels, parts[rank], again and torch.is_grad_enabled()), lengths

    def forward(self, pixels: torch.Tensor, grid: list[list[int]], again: bool = False) -> torch.Tensor:
        """pixels [s, 1176] of media [[t, h, w], ...] -> features [s / m², hidden size of the language model]."""
        config, merge = self.config, self.config.spatial_merge_size
        side = config.window_size // config.patch_size // merge
        where = places(tuple(map(tuple, grid)), merge, side)
        runs = {True: Packed(where.slices), False: Packed(where.windows)}
        cos, sin = self._rotary(hardware.upload(where.yx))
        weight = self.patch_embed.proj.weight
        x = F.linear(pixels.to(weight.dtype), weight.flatten(1))
        x = x.view(-1, merge**2, x.shape[1])[hardware.upload(where.order)].flatten(0, 1)
        for i, block in enumerate(self.blocks):
            x = self._block(block, again, x, runs[i in config.fullatt_block_indexes], cos, sin)
        features = self.merger.mlp(self.merger.ln_q(x).view(-1, self.merged))
        return features[hardware.upload(where.back)]

    def _block(self, block: "Block", again: bool, x: torch.Tensor, *rest) -> torch.Tensor:
        return Again.apply(lambda x: (block(x, *rest),), x)[0] if again else block(x, *rest)

    def _rotary(self, yx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[s, 2] -> cosine and sine, each [s, 1, D / 2] float32: the first half of the angles are the row's, the second
        the column's."""
        quarter = self.config.hidden_size // self.config.num_heads // 4
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(quarter, dtype=torch.float, device=yx.device) / quarter)
        angles = (yx[:, :, None] * frequencies).flatten(1)[:, None]
        return angles.cos(), angles.sin()


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Packed) -> torch.Tensor:
    """Rows of a run attend to each other: [s, H, D] each -> [s, H, D]."""
    if query.is_cuda:
        return varlen_attn(query, key, value, runs.starts, runs.starts, runs.longest, runs.longest)
    out, start = [], 0
    for length, equal in groupby(runs.lengths):  # neighbours of one length in one call
        rows = slice(start, start := start + length * len(list(equal)))
        q, k, v = (x[rows].unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
        out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


class Block(nn.Module):
    def __init__(self, config, dtype: torch.dtype):
        super().__init__()
        hidden, inner, self.heads = config.hidden_size, config.intermediate_size, config.num_heads
        self.norm1 = nn.RMSNorm(hidden, eps=1e-6, dtype=dtype)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-6, dtype=dtype)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv = nn.Linear(hidden, 3 * hidden, dtype=dtype)
        self.attn.proj = nn.Linear(hidden, hidden, dtype=dtype)
        self.mlp.gate_proj = nn.Linear(hidden, inner, dtype=dtype)
        self.mlp.up_proj = nn.Linear(hidden, inner, dtype=dtype)
        self.mlp.down_proj = nn.Linear(inner, hidden, dtype=dtype)

    def forward(self, x: torch.Tensor, runs: Packed, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[s, hidden] -> [s, hidden]."""
        qkv = self.attn.qkv(self.norm1(x)).unflatten(1, (3 * self.heads, -1))
        qkv = rotate(qkv, cos, sin, 2 * self.heads)  # values, behind queries and keys, pass through
        out = _attend(*qkv.unflatten(1, (3, -1)).unbind(1), runs)
        x = x + self.attn.proj(out.flatten(1))
        return x + gated_mlp(self.norm2(x), self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj)


def _main() -> None:
    """Forward and backward of one clip through two blocks of 3B's tower, ours and transformers'."""
    import copy

    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    import configs

    config = copy.deepcopy(configs.load_config("qwen2.5-vl-3b").vision_config)
    config.depth, config.fullatt_block_indexes = 2, [1]
    device = hardware.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    theirs = Qwen2_5_VisionTransformerPretrainedModel(config).to(device, dtype)
    ours = VisionTower(config, dtype)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    grid, pixels = [[2, 16, 16]], torch.randn(512, 1176, device=device, dtype=dtype)
    print("ours:", time_and_bytes(lambda: ours(pixels, grid)))
    grid_thw = torch.tensor(grid, device=device)
    print("transformers':", time_and_bytes(lambda: theirs(pixels, grid_thw=grid_thw).pooler_output))


if __name__ == "__main__":
    _main()

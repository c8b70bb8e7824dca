"""The worker: the process that holds an engine's model, and what makes vLLM's model read the trainer's weights.

    worker of rollout rank r                            trainer rank, same GPU
    ┌──────────────────────────────────┐                ┌───────────────────────┐
    │ model    parameters without      │                │ arena                 │
    │          memory of their own     │── views of ───►│   snapshot of rank r  │
    │ arena    KV cache: pages come    │                └───────────────────────┘
    │          and go, addresses stay  │
    └──────────────────────────────────┘

No memory is allocated for weights: a registered loader (load_format="rollplex") builds vLLM's model with parameters
that have none, maps the trainer's snapshot and puts a view of it behind each. More is changed in vLLM: where its KV
cache lies and, on a GPU, in what precision it samples and rotates queries and keys. A GPU and a CPU draw different
random streams from one seed.

At TP 1 the engine's own process is the worker. At more, vLLM spawns one process per GPU, which runs the main file,
engine.py, first, and imports this one for EngineExtension once vLLM is there: that makes it ours (the last line).

Run:
    python rollout.py                 # an engine with one worker
Left out on purpose: quantised weights, which cannot be views of what the trainer writes.
To bind weights another way, edit weights.bind_engine(); to place the KV cache elsewhere, _place_kv_in_arena().
"""

import gc
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hardware
import layers
import memory
import weights
from arena import Arena, align, attach


def layout(binding: dict[str, Any]) -> weights.Layout:
    """The trainer's layout of a rollout rank's snapshot, from the fields of Binding. ValueError if the sizes differ."""
    from transformers import AutoConfig

    config, dtype = AutoConfig.from_pretrained(binding["model_dir"]), getattr(torch, binding["dtype"])
    plan = weights.layout(config, binding["train_tp"], len(binding["handles"]), binding["qkv"], dtype)
    if plan.nbytes != binding["nbytes"]:
        raise ValueError(f"the trainer's snapshot has {binding['nbytes']} bytes, the engine's layout {plan.nbytes}")
    return plan


def imported() -> None:
    """vLLM has been imported, by the engine or a worker: make it ours, and collect garbage from here on.

    What is there by now stays for good; not searching it time and again makes start-up a third shorter (measured, CPU).
    """
    _register_loader()
    _place_kv_in_arena()
    if hardware.gpu_host():  # not hardware.device(), which would start CUDA before a worker has chosen its GPU
        _sample_in_float32()
        _rotate_in_one_kernel()
    gc.freeze()
    gc.enable()


class EngineExtension:
    """Methods that vLLM adds to each worker (worker_extension_cls), called through collective_rpc."""

    rollplex_kv: Arena  # set once vLLM allocates its KV cache (_place_kv_in_arena)

    def rollplex_report(self) -> dict[str, Any]:
        """Addresses of the parameters and of the snapshot, what the process holds, and what building the model took.

        loading: {parameter_bytes: of parameters that had memory of their own, made_bytes: of all real tensors made}.
        """
        model = self.model_runner.get_model()
        low, size = model.rollplex_snapshot.data_ptr(), model.rollplex_snapshot.numel()
        places = {name: (p.data_ptr(), p.nbytes) for name, p in model.named_parameters()}
        return {
            "pid": os.getpid(),
            "parameters": places,
            "snapshot": (low, size),
            "outside": [n for n, (start, nbytes) in places.items() if not low <= start < start + nbytes <= low + size],
            "loading": model.rollplex_loading,
            "kv_bytes": self.rollplex_kv.nbytes("kv"),
            "kv_resident_bytes": self.rollplex_kv.resident_bytes("kv"),
            "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE,
        }

    def rollplex_log_memory(self, paths: list[str], headers: list[dict], sample_ms: float) -> None:
        """Sample what this worker holds on its device until the process ends."""

        def read() -> tuple[str, dict[str, int]]:
            arena = self.rollplex_kv
            kv_bytes = arena.nbytes("kv") if arena.mapped("kv") else 0
            return "engine", {"rollout_kv": kv_bytes, "engine_other": hardware.allocator_bytes()}

        self.rollplex_memory_log = memory.MemoryLog(Path(paths[self.rank]), headers[self.rank], read, sample_ms)

    def rollplex_map_kv(self, mapped: bool) -> dict[str, int]:
        """Give the KV cache its pages back, or them away with what the allocator keeps for later. Addresses stay, also
        those in captured graphs; the contents are lost. The report is that of EngineClient.release_kv()."""
        arena = self.rollplex_kv
        before, others = arena.resident_bytes("kv"), {"other_before": hardware.allocator_bytes()}
        if mapped:
            arena.acquire("kv")
        else:
            arena.release("kv")
            hardware.empty_cache()
        if hasattr(self, "rollplex_memory_log"):
            self.rollplex_memory_log.sample()
        after = arena.resident_bytes("kv")
        others |= {"other_bytes": hardware.allocator_bytes(), "host_bytes": hardware.host_bytes()}
        return {"kv_bytes": arena.nbytes("kv"), "resident_before": before, "resident_after": after} | others

    def rollplex_positions(self, prompt_ids: list[int], mm_features: list) -> list[list[int]]:
        """M-RoPE positions [3, P] as the model runner computes them."""
        return self.model_runner.get_model().get_mrope_input_positions(prompt_ids, mm_features)[0].tolist()


# ---- weights: views in place of allocations --------------------------------------------------------------------------


class _WithoutMemory(TorchDispatchMode):
    """While a model is built: what its parameters are made of has shape and type, but no memory (device "meta").

    vLLM 0.26 makes the parameters of this model with torch.empty and torch.ones on its device, and nothing else that it
    keeps: caches and scales come from other functions and stay real. check() finds out if that ever changes.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.made_bytes = device, 0  # bytes of every real tensor, those included that live for a moment

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        makes = function in (aten.empty.memory_format, aten.ones.default)
        if makes and torch.device(kwargs.get("device") or "cpu").type == self.device.type:
            return function(*args, **kwargs | {"device": torch.device("meta")})
        result = function(*args, **kwargs)
        if all(value.alias_info is None for value in function._schema.returns):  # neither a view nor written in place
            values = result if isinstance(result, tuple | list) else (result,)
            self.made_bytes += sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and not v.is_meta)
        return result

    @staticmethod
    def check(model: torch.nn.Module) -> None:
        """RuntimeError naming the tensors of a bound model that still have no memory."""
        left = [
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name, value in (vars(module) | module._parameters | module._buffers).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if left:
            why = "vLLM makes them the way it makes parameters; worker._WithoutMemory must tell them apart"
            raise RuntimeError(f"{len(left)} tensors of the engine's model have no memory, {left[:5]}: {why}")


def _register_loader() -> None:
    """Make load_format="rollplex" known to vLLM: map this rank's snapshot instead of allocating and loading weights."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader import register_model_loader, utils
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    @register_model_loader("rollplex")
    class SnapshotLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        def load_model(self, vllm_config, model_config, prefix: str = "") -> torch.nn.Module:
            """As in vLLM, but between building and binding, parameters have no memory."""
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(model_config.dtype), device:
                with _WithoutMemory(device) as building:
                    model = utils.initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                kept = sum(p.nbytes for p in model.parameters() if not p.is_meta)
                model.rollplex_loading = {"parameter_bytes": kept, "made_bytes": building.made_bytes}
                self.load_weights(model, model_config)
                building.check(model)
                utils.process_weights_after_loading(model, model_config, device)
            return model.eval()

        def load_weights(self, model, model_config) -> None:
            binding = self.load_config.model_loader_extra_config
            snapshot = attach(binding["handles"][get_tensor_model_parallel_rank()], binding["nbytes"])
            weights.bind_engine(model, snapshot, layout(binding))
            model.rollplex_snapshot = snapshot
            hardware.empty_cache()
            _unlink_cpu_communicator()


def _unlink_cpu_communicator() -> None:
    """Remove the names of vLLM's CPU tensor-parallel segments, which a killed worker would leave in /dev/shm.

    Every rank has mapped them when weights are loaded; the memory lives as long as the mappings.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{identity}-*-cpushm_*"):
            path.unlink(missing_ok=True)


# ---- KV cache, sampler, rotary embedding -----------------------------------------------------------------------------


def _place_kv_in_arena() -> None:
    """Have vLLM's model runner take the KV cache from an arena region, so that its pages can come and go.

    vLLM 0.26 has two model runners. On a GPU ours is the newer one, which keeps a batch's state on the GPU, so that the
    host has less to do for a step. It needs Triton, which vLLM's CPU build does not have.
    """

    def allocate(kv_cache_config) -> dict[str, torch.Tensor]:
        """Layer name -> its part of the region, int8 [bytes], zeroed."""
        tensors = kv_cache_config.kv_cache_tensors
        if any(tensor.block_stride > 0 for tensor in tensors):
            raise NotImplementedError("a KV cache whose layers are interleaved in one allocation")
        arena = Arena({"kv": sum(align(tensor.size) for tensor in tensors)})
        EngineExtension.rollplex_kv = arena
        region, offset, named = arena.acquire("kv").zero_().view(torch.int8), 0, {}
        for tensor in tensors:
            named |= dict.fromkeys(tensor.shared_by, region[offset : offset + tensor.size])
            offset += align(tensor.size)
        return named

    if hardware.gpu_host():
        from vllm.v1.worker.gpu import attn_utils

        attn_utils._allocate_kv_cache = lambda config, shared_layers, device: allocate(config)
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's runner inherits from it

        GPUModelRunner._allocate_kv_cache_tensors = lambda runner, config: allocate(config)


def _sample_in_float32() -> None:
    """Have vLLM's newer model runner add biases and divide by the temperature in FP32, as its older one and the trainer
    do, not in the logits' BF16: that would be off by more than the two passes differ."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sample = Sampler.__call__
    Sampler.__call__ = lambda sampler, logits, batch: sample(sampler, logits.float(), batch)


def _rotate_in_one_kernel() -> None:
    """Have vLLM rotate queries and keys where they lie, with angles in FP32. Its way takes six kernels a layer and
    cosines rounded to BF16, which the trainer's are not."""
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    def forward(layer, positions, query, key, offsets=None):
        if not hasattr(layer, "rollplex_inverse"):  # by the time graphs are captured it is there
            if layer.scaling_factor is not None or layer.mrope_interleaved or layer.rotary_dim != layer.head_size:
                raise NotImplementedError("a rotary embedding other than Qwen2.5-VL's, scaled, interleaved or partial")
            layer.rollplex_inverse = layer._compute_inv_freq(layer.base).to(query.device, torch.float32)
        axes = positions.expand(3, -1)  # text alone may have one
        layers.rotate_in_place(query, key, axes, layer.rollplex_inverse, layer.mrope_section)
        return query, key

    MRotaryEmbedding.forward_cuda = forward


if "vllm" in sys.modules:  # imported by a vLLM worker, for EngineExtension and before it loads the model
    imported()

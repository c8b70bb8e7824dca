"""A run: its directory, what it writes there, and how it ends.

    runs/NAME/  config.json · metrics.jsonl · trace.json · plan.json · memory-*.jsonl · engine*.log
                checkpoint-000100/rank0.pt …      the last two, each complete or not there

Rank 0 writes what all ranks have measured. However a rank ends, its engine ends with it, and one rank says why (Ends).

Run:
    torchrun --nproc-per-node 2 train.py --run-dir runs/x            # with --resume to continue it
Left out on purpose: figures and tables (bench.py draws them from these files).
To log another figure, add it to step_metrics() and to README's table.
"""

import ctypes
import json
import math
import os
import sched
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import configs
import data
import hardware
import optimizer as optim
import plan
import settings
import weights

if TYPE_CHECKING:  # train.py is built on this file, and is another module where it is the program
    from train import Config
    from trainer import Ranks, Trainer


# ---- the directory ---------------------------------------------------------------------------------------------------


def prepare_run(config: "Config", ranks: "Ranks") -> tuple[Path, Path]:
    """Agree on the run directory and the model directory; rank 0 makes them. Collective."""
    chosen: list = [config.run_dir or f"runs/{Path(config.model).name}-{config.overlap}-{time.strftime('%m%d-%H%M%S')}"]
    dist.broadcast_object_list(chosen, group=ranks.everyone)
    run_dir = Path(chosen[0])
    if ranks.rank == 0:
        settings_path, asked = run_dir / "config.json", json.loads(json.dumps(asdict(config)))
        if config.resume:
            if not any(run_dir.glob("checkpoint-??????")):
                raise ValueError(f"--resume: {run_dir} has no checkpoint; start without --resume in a new --run-dir")
            before = json.loads(settings_path.read_text()) if settings_path.exists() else asked
            for line in _differences(before, asked):
                print(f"resumed with another {line}", flush=True)
        elif (run_dir / "metrics.jsonl").exists():
            raise ValueError(f"--run-dir {run_dir}: has a run already; add --resume to continue it, or choose another")
        else:
            for left in run_dir.glob("memory-*.jsonl"):  # of a run that ended before its first step
                left.unlink()
        for left in run_dir.glob("checkpoint-??????.partial"):  # of a run that ended as it wrote it
            shutil.rmtree(left)
        run_dir.mkdir(parents=True, exist_ok=True)
        settings_path.write_text(json.dumps(asked, indent=1))
        if not config.data.path:
            data.make_synthetic(run_dir.parent / "data", config.data)
    dist.barrier()
    model_dir = configs.make_model_dir(config.model, run_dir.parent / "models") if config.named else Path(config.model)
    return run_dir, model_dir


def _differences(before: dict, now: dict, prefix: str = "--") -> Iterator[str]:
    """The fields that are not as they were, as "--field: before -> now"; what says how to run is no difference."""
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            yield from _differences(old, value, f"{prefix}{name}.")
        elif value != old and f"{prefix}{name}" not in ("--resume", "--run_dir", "--steps"):
            yield f"{prefix}{name.replace('_', '-')}: {old} -> {value}"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


_KEPT = 2  # checkpoints; one more is there while it is written


def check_disk(config: "Config", run_dir: Path, state_bytes: int, model_bytes: int) -> None:
    """Raise ValueError if there is no room for what the run will have written at once: checkpoints of state_bytes, and
    an exported model of model_bytes, as large as the reference that a warm-up makes. Whatever else it writes is
    small."""
    steps = [int(path.name.removeprefix("checkpoint-")) for path in run_dir.glob("checkpoint-??????")]
    there, done, every = len(steps), max(steps, default=0), config.checkpoint_every
    coming = math.ceil(config.steps / every) - done // every if every and done < config.steps else 0
    most, kept = (max(0, min(limit, there + coming) - there) for limit in (_KEPT + 1, _KEPT))
    needed = max(most * state_bytes, kept * state_bytes + config.export * model_bytes)
    if config.warmup_steps and config.algo.kl_coef and not config.resume:
        needed += model_bytes
    if needed > (free := shutil.disk_usage(run_dir).free):
        each, total, room = map(hardware.readable, (state_bytes, needed, free))
        raise ValueError(
            f"--run-dir {run_dir}: {total} are needed there ({most} checkpoints of {each}, or fewer and the model), "
            f"but {room} are free: make room, choose another, or write less: --checkpoint-every 0, --no-export"
        )


def save_checkpoint(trainer: "Trainer", step: int, position: int) -> None:
    """Write what the next step starts from; it appears under its name only when every rank's part is there.
    Collective."""
    ranks = trainer.ranks
    final = trainer.run_dir / f"checkpoint-{step:06d}"
    partial = final.with_suffix(".partial")
    if ranks.rank == 0:
        partial.mkdir(parents=True)
    dist.barrier()
    if ranks.replica == 0:  # replicas hold the same state
        state = dict(
            optimizer={name: alone(value) for name, value in trainer.optimizer.state_dict().items()},
            position=position,
            seen=trainer.loader.seen,
            bad=trainer.loader.bad,
        )
        _write(state, partial / f"rank{ranks.tp_rank}.pt")
    dist.barrier()
    if ranks.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(trainer.run_dir.glob("checkpoint-??????"))[:-_KEPT]:
            shutil.rmtree(old)


def alone(value: object) -> object:
    """A CPU tensor without what else is in its storage, which torch.save would write with it: the whole host pool. No
    copy. Anything else as it is."""
    pooled = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return torch.from_numpy(value.numpy()) if pooled else value


def _write(state: dict, path: Path) -> None:
    """Raises ValueError, and leaves nothing of it, if the file system does not take it."""
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:  # PyTorch's writer has no word for a full disk
        path.unlink(missing_ok=True)
        raise ValueError(
            f"{path} could not be written, {hardware.readable(shutil.disk_usage(path.parent).free)} are free there "
            f"({str(error).splitlines()[0]}): earlier checkpoints are whole; make room, then --resume"
        ) from error


def load_checkpoint(trainer: "Trainer") -> tuple[int, int]:
    """Restore the last complete checkpoint; returns the next step and data position."""
    last = max(trainer.run_dir.glob("checkpoint-??????"))  # prepare_run() has seen that there is one
    state = torch.load(last / f"rank{trainer.ranks.tp_rank}.pt", weights_only=True, mmap=True)
    trainer.arena.acquire("workspace")
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.arena.release("workspace")
    trainer.snapshot.publish()
    trainer.loader.seen, trainer.loader.bad = state["seen"], state["bad"]
    return int(last.name.removeprefix("checkpoint-")), state["position"]


# ---- metrics ---------------------------------------------------------------------------------------------------------


def step_metrics(
    trainer: "Trainer", groups: list[sched.Group], sums: dict[str, torch.Tensor], info: optim.StepInfo, step_s: float
) -> dict:
    """What README's table explains, from sums over all replicas. Collective over all ranks."""
    mine, history = _rank_figures(trainer, groups, sums), trainer.schedule.partition.history
    everyone = sched.gathered(mine, trainer.ranks.everyone)
    replicas = everyone[:: trainer.ranks.tp]
    total = {
        name: sum(r["sums"].get(name, 0.0) for r in replicas) for name in ("loss", "kl", "gap", "clipped", "tokens")
    }
    tokens = max(1.0, total["tokens"])
    scored = [pair for r in replicas for pair in r["rewards"]]
    rewards, sources = [reward for _, reward in scored], source_means(scored)
    lengths = [length for r in replicas for length in r["lengths"]]
    scale = tokens if trainer.config.algo.aggregate == "token" else max(1, sum(length > 0 for length in lengths))
    chance = [c for r in replicas for c in r["chance"]]
    roles = 1 if trainer.schedule.reference is None else 2
    return {
        "reward_mean": sum(rewards) / len(rewards),
        **({f"reward/{source}": mean for source, mean in sources.items()} if len(sources) > 1 else {}),
        **({"chance": sum(chance) / len(chance)} if len(chance) == trainer.config.prompts else {}),
        "loss": total["loss"] / scale,
        "kl": total["kl"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "logprob_diff_mean": total["gap"] / tokens,
        "logprob_diff_max": max(r["sums"].get("gap_max", 0.0) for r in replicas),
        "entropy": sum(r["nll"] for r in replicas) / max(1, sum(lengths)),
        "equal_reward_groups": sum(r["flat"] for r in replicas) / trainer.config.prompts,
        "response_tokens_mean": sum(lengths) / len(lengths),
        "truncated_fraction": sum(r["truncated"] for r in replicas) / len(lengths),
        "prompt_tokens_mean": sum(r["prompt_tokens"] for r in replicas) / trainer.config.prompts,
        "visual_tokens_mean": sum(r["visual_tokens"] for r in replicas) / trainer.config.prompts,
        "slice_tokens_mean": sum(r["visual_tokens"] for r in replicas) / max(1, sum(r["slices"] for r in replicas)),
        "grad_norm": info.grad_norm,
        "lr": info.lr,
        "skipped": info.skipped,
        "bad_samples": trainer.loader.bad,
        "prefix_share": sum(r["beside_tokens"] for r in replicas) / (roles * sum(r["prompt_tokens"] for r in replicas)),
        **({"prefix_sms": history[-1].sms} if history and trainer.schedule.overlap == "prefix" else {}),
        "generate_s": (generate_s := max(r["generate_s"] for r in everyone)),
        "tok_s_generate": sum(lengths) / max(generate_s, 1e-9),
        "step_s": step_s,
        **{f"memory/phase{phase}_peak_bytes": max(r["peaks"][phase] for r in everyone) for phase in "123"},
        "memory/host_bytes": sum(r["host_bytes"] for r in everyone),
        **{f"load/{name}": mean for name, mean in trainer.load.take().items()},  # rank 0's are logged
        "model_flops": sum(r["flops"] for r in replicas),
        "tokens": sum(lengths) + sum(r["prompt_tokens"] for r in replicas),
    }


def source_means(scored: list[tuple[str, float]]) -> dict[str, float]:
    """(source, reward) pairs -> each source's mean reward."""
    by_source = {source: [r for s, r in scored if s == source] for source in sorted({s for s, _ in scored})}
    return {source: sum(rewards) / len(rewards) for source, rewards in by_source.items()}


def _rank_figures(trainer: "Trainer", groups: list[sched.Group], sums: dict[str, torch.Tensor]) -> dict:
    """What one rank adds to a step's metrics: of its replica's groups, of its engine and of its memory."""
    responses = [r for group in groups for r in group.responses]
    stats = trainer.schedule.rollout
    return dict(
        sums={name: value.item() for name, value in sums.items()},
        rewards=[(group.sample.source, reward) for group in groups for reward in group.rewards.tolist()],
        flat=sum(not group.advantages.any() for group in groups),
        lengths=[len(r.token_ids) for r in responses],
        truncated=sum(r.finish_reason == "length" for r in responses),
        nll=-sum(sum(r.logprobs) for r in responses),
        prompt_tokens=sum(len(group.sample.input_ids) for group in groups),
        beside_tokens=trainer.schedule.beside_tokens,
        visual_tokens=sum(group.sample.visual_tokens for group in groups),
        slices=sum(int(group.sample.grid_thw[:, 0].sum()) for group in groups),
        flops=sum(_group_flops(trainer, group) for group in groups),
        chance=[1 / len(group.sample.options) for group in groups if group.sample.options],
        peaks={phase: sum(trainer.ledger.peaks.get(phase, {}).values()) for phase in "123"},
        host_bytes=hardware.host_bytes() + trainer.schedule.engine_host_bytes,
        generate_s=stats.seconds if stats else 0.0,
    )


def _group_flops(trainer: "Trainer", group: sched.Group) -> float:
    """Useful floating-point operations of one group in a step: 2 per weight and token forward, 4 backward, and
    attention.

    Forward and backward for the actor, forward for the reference; a recomputed forward does not count. Prompt tokens
    meet neither the output layer nor, in the last layer, more than its QKV. The vision tower's few window attentions
    are left out, its weights are not."""
    text, responses = trainer.actor.config.text_config, sum(len(r.token_ids) for r in group.responses)
    p, patches = len(group.sample.input_ids), 4 * group.sample.visual_tokens
    numel = {row.hf: torch.Size(row.shape).numel() for row in trainer.plan.rows}
    tower = sum(n for name, n in numel.items() if name.startswith("visual."))
    layers = sum(n for name, n in numel.items() if name.startswith("model.layers."))
    last = f"model.layers.{text.num_hidden_layers - 1}."
    unused = sum(n for name, n in numel.items() if name.startswith(last) and not name.startswith(f"{last}self_attn."))
    unused += numel[f"{last}self_attn.o_proj.weight"]
    output = numel["model.embed_tokens.weight"]  # as large as the output layer
    forward = 2 * ((layers - unused) * p + (layers + output) * responses + tower * patches)
    pairs = p * p / 2 + sum(len(r.token_ids) * (p + len(r.token_ids) / 2) for r in group.responses)
    forward += 4 * text.hidden_size * text.num_hidden_layers * pairs  # (query, key) pairs, the prompt's once
    return forward * (3 + (trainer.schedule.reference is not None))


# ---- logging ---------------------------------------------------------------------------------------------------------


class Log:
    """Rank 0's output: the step line, metrics.jsonl, trace.json and, if asked, Weights & Biases."""

    def __init__(self, config: "Config", run_dir: Path, ranks: "Ranks"):
        self.config, self.ranks, self.begin = config, ranks, time.monotonic()
        if ranks.rank:
            return
        hardware.peak_flops()  # measured once: now, while nothing else uses the device
        self._path = run_dir / "metrics.jsonl"
        self._metrics = self._path.open("a")
        self._trace = sched.TraceFile(run_dir / "trace.json")
        self._wandb = None
        if config.wandb != "off":
            import wandb

            self._wandb = wandb.init(project="rollplex", mode=config.wandb, dir=run_dir, config=asdict(config))

    def rewind(self, step: int) -> None:
        """Drop what was logged for `step` and later: a resumed run computes it again."""
        if self.ranks.rank == 0:
            lines = self._path.read_text().splitlines(keepends=True)
            self._metrics.close()
            self._path.write_text("".join(line for line in lines if json.loads(line)["step"] < step))
            self._metrics = self._path.open("a")

    def step(self, step: int, metrics: dict, timeline: sched.Timeline) -> None:
        """Collective over all ranks: gathers their trace events. Seconds per phase are rank 0's and add up to
        step_s."""
        events, seconds = timeline.take()
        pieces = sched.gathered(events, self.ranks.everyone)
        if self.ranks.rank:
            return
        everything = (event for rank_events in pieces for event in rank_events)
        self._trace.write([event | {"args": {"step": step} | event["args"]} for event in everything])
        seconds["other"] = metrics["step_s"] - sum(seconds.values())
        metrics |= {f"phase/{name}": value for name, value in seconds.items()}
        busy = sum(seconds.get(name, 0.0) for name in ("reference prefix", "actor prefix", "reference", "actor"))
        metrics["tok_s_train"] = metrics["tokens"] / max(busy, 1e-9)
        peak = hardware.peak_flops()
        metrics["mfu"] = None if peak is None else metrics["model_flops"] / self.ranks.world / max(busy, 1e-9) / peak
        metrics["elapsed_s"] = time.monotonic() - self.begin
        record = {"step": step} | metrics
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(record, step=step)
        print(self._line(step, metrics, seconds), flush=True)

    def _line(self, step: int, m: dict, seconds: dict[str, float]) -> str:
        eta_s = (self.config.steps - step - 1) * m["step_s"]
        phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005 or name == "other")
        mfu = "n/a" if m["mfu"] is None else f"{m['mfu']:.1%}"
        parts = (
            f"step {step + 1}/{self.config.steps}",
            f"reward {m['reward_mean']:.3f}  loss {m['loss']:+.4f}  kl {m['kl']:.4f}  clip {m['clip_fraction']:.3f}",
            f"|Δlogp| {m['logprob_diff_mean']:.1e} (max {m['logprob_diff_max']:.1e})",
            f"grad {m['grad_norm']:.2f}{' SKIPPED' if m['skipped'] else ''}  len {m['response_tokens_mean']:.1f}",
            f"gen {m['tok_s_generate']:.0f} tok/s  train {m['tok_s_train']:.0f} tok/s  MFU {mfu}",
            f"{m['step_s']:.2f} s = {phases}  (data waited {m['data_wait_s']:.2f})  eta {eta_s / 60:.0f} min",
        )
        evaluation = f"\n  evaluation: reward {m['eval/reward_mean']:.3f}" if "eval/reward_mean" in m else ""
        return "  ".join(parts) + evaluation

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        if self.ranks.rank == 0 and self._wandb is not None:
            self._wandb.finish()


def facts(trainer: "Trainer") -> str:
    """Derived figures, once per run: what a step costs and what a rank holds."""
    config, plan, ranks = trainer.config, trainer.plan, trainer.ranks
    parameters = weights.coverage(plan.rows)
    total = sum(parameters.values())
    share = " / ".join(f"{100 * count / total:.1f}" for count in parameters.values())
    responses = config.prompts * config.rollout.n
    reference = trainer.arena.nbytes("reference") if config.algo.kl_coef else 0
    case3 = weights.fused_nbytes(plan) if config.qkv == "fused" else 0
    rows = (
        ("weights, shared with the engine", plan.nbytes, f"rollout TP shard; cases 1/2/3: {share} % of parameters"),
        ("weights, the trainer's own QKV", case3, "Case 3, permuted into the snapshot after each update"),
        ("reference weights", reference, "host; on the device only around their two windows"),
        ("gradients", 4 * trainer.numel, "FP32, Phases 2 and 3"),
        ("optimizer state", 12 * trainer.numel, "host: FP32 master and two moments"),
        ("optimizer workspace", optim.workspace_bytes(config.optimizer), "Phase 3, whatever the model's size"),
        ("optimizer, loaded ahead", trainer.optimizer.ahead_bytes, "from the last micro-batches of Phase 2 on"),
        ("KV cache of the engine", config.rollout.kv_cache_gib * 2**30, "Phase 1"),
    )
    lines = [
        f"{config.model}: {total / 1e6:.2f} M parameters, {config.dtype}; {ranks.world} ranks, train TP {ranks.tp}, "
        f"rollout TP {config.rollout_tp}, {ranks.world // config.rollout_tp} engines",
        f"a step: {config.prompts} prompts, at most {config.prompts * config.data.max_prompt_tokens} tokens; "
        f"{responses} responses, at most {responses * config.rollout.max_new_tokens} tokens",
        "bytes per rank:",
    ]
    if any(limits := tuple(trainer.schedule.partition.limits)) and (sms := hardware.sm_count()):
        share = " or ".join(str(number or sms) for number in limits)
        lines.insert(2, f"prefixes beside decode: {share} of a GPU's {sms} SMs (--sm-policy {config.sm_policy})")
    held = [f"  {name:32s} {nbytes / 2**20:10.2f} MiB  {text}" for name, nbytes, text in rows if nbytes]
    return "\n".join(lines + held)


def write_plan(trainer: "Trainer", metrics: dict) -> None:
    """RUN/plan.json: what the planner expects in each phase of a step like this one, for `bench.py memory`."""
    config, ranks = trainer.config, trainer.ranks
    names = "prompt", "visual", "slice", "response"
    tokens = {f"{name}_tokens": math.ceil(metrics[f"{name}_tokens_mean"]) for name in names}
    tokens["slice_tokens"] = max(1, tokens["slice_tokens"])  # 0 without media
    whole = max(1, config.micro_tokens // tokens["prompt_tokens"])  # prompts at once
    step = replace(settings.workload(config), micro_tokens=whole * tokens["prompt_tokens"], exact=True, **tokens)
    planned = plan.plan(trainer.actor.config, ranks.world, ranks.tp, config.rollout_tp, step, config.memory)
    phases = {phase: planned.peak(phase).bytes for phase in "123"}
    (trainer.run_dir / "plan.json").write_text(json.dumps({"phase": phases}, indent=1))


# ---- ends ------------------------------------------------------------------------------------------------------------


LOST = "lost another rank, which ended without saying why (killed, or out of memory?)"
_ORPHANED = signal.SIGUSR2  # torchrun has been killed; what torchrun itself sends, to end its ranks, is SIGTERM


class Ends:
    """However a rank ends, its engine ends with it, and one rank says why.

    A signal handler in Python runs only between bytecodes, so a rank that hangs in a collective would not notice
    SIGTERM. The signal's C half still writes to a pipe; a thread reads it and ends the process. The same thread watches
    the engine."""

    def __init__(self, rank: int):
        self.rank, self.trainer, self.timeline, self.run_dir, self.step = rank, None, None, None, None
        self._store: dist.TCPStore | None = None
        self._siblings: list[int] = []  # process ids of this host's ranks
        self._ending = threading.Lock()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, _ORPHANED):
            signal.signal(number, lambda *_: None)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; if it is killed, the kernel tells its ranks
            ctypes.CDLL(None).prctl(1, _ORPHANED)  # PR_SET_PDEATHSIG
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        import select

        while True:
            if select.select([self._read], [], [], 0.5)[0]:
                number = signal.Signals(os.read(self._read, 1)[0])
                if number == _ORPHANED:
                    self.fail("torchrun, which started this rank, is gone", 1)
                if number == signal.SIGTERM and not all(map(_lives, self._siblings)):
                    self.fail(LOST, 1)  # torchrun, which has noticed before a collective did
                self.fail("interrupted" if number == signal.SIGINT else f"stopped by {number.name}", 128 + number)
            engine = self.trainer and self.trainer.engine
            if engine and engine.died is not None:
                self.fail(str(engine.died), 1)

    def fail(self, reason: str, status: int) -> None:
        """Say why, unless another rank did; stop the engine; end the process. Safe from any thread: the first is the
        one that does it."""
        self._ending.acquire()  # for good: whoever comes later waits here for the end
        where = f"rank {self.rank}" + (f", step {self.step + 1}" if self.step is not None else "")
        where += f", {self.timeline.phase}" if self.timeline else ""
        if self._first(f"{where}: {reason}"):
            print(f"\nrollplex stopped: {where}: {reason}", file=sys.stderr, flush=True)
            if self.run_dir is not None and any(self.run_dir.glob("checkpoint-??????")):
                print(f"continue with --run-dir {self.run_dir} --resume", file=sys.stderr, flush=True)
        elif self._store is None:
            time.sleep(sched.SPEAKS_WITHIN_S)
        try:
            if self.trainer is not None:
                self.trainer.close()
        finally:
            os._exit(status)

    def connect(self, ranks: "Ranks") -> None:
        """Call once the process group exists; collective over all ranks. A connection to the store of its own: the
        group's is locked while a collective waits on it."""
        everyone = sched.gathered((socket.gethostname(), os.getpid()), ranks.everyone)
        self._siblings = [pid for host, pid in everyone if host == socket.gethostname()]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=5)
        self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)

    def _first(self, reason: str) -> bool:
        """Whether this rank is the first to report: the others fail only because it did."""
        if self._store is None:  # nothing is distributed yet, and every rank of a host sees the same error
            return os.environ.get("LOCAL_RANK", "0") == "0"
        lowest = os.getpid() == next(filter(_lives, self._siblings))  # asked now: the store may take seconds to answer
        try:
            return self._store.compare_set("rollplex/failure", "", reason).decode() == reason
        except RuntimeError:  # torchrun is gone, and the store with it: of the ranks that lived, the host's first
            return lowest


def _lives(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

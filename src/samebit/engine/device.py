"""Where an engine computes: settings that depend on the device, the runner on it, and how much memory is left for pools."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import torch

from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.engine.loading import Loaded
from samebit.engine.memory import memory_table
from samebit.engine.sizing import DEFAULT_CACHE_BYTES, size_pools
from samebit.inputs import Bucket
from samebit.models.checkpoint import read_json
from samebit.runner.ladder import ladder
from samebit.runner.runner import LocalRunner
from samebit.runner.step import LOGITS_SLICE, Speculation
from samebit.state.layout import StateGeometry
from samebit.state.pools import StatePools

_log = logging.getLogger(__name__)

_CHOICES = {
    # Triton's interpreter runs its kernels on a CPU, for whoever works on them.
    "kernels": {"cpu": ("native", "torch", "triton"), "cuda": ("triton",)},
    "graph": {"cpu": ("eager", "trace"), "cuda": ("eager", "trace", "cuda")},
    "dtype": {"cpu": ("float32",), "cuda": ("float32", "bfloat16")},
}
# What a token more costs in a step, as a share of what one costs without any: on a CPU a step's time goes with its tokens; on a GPU it hardly does
# once there are some. See docs/speculation.md for what they were measured with.
_TOKEN_COSTS = {"cpu": 0.15, "cuda": 0.02}
# Of the memory that a step takes: the graphs keep their own, and steps that run eagerly take it once more.
_WORKSPACES = 2


def settled(config: EngineConfig, folder: Path) -> EngineConfig:
    """`config` with a device, dtype and graph, for the model in `folder`; ConfigError names what this machine cannot do."""
    device = config.device
    if device == "auto":
        has_gpu = torch.cuda.is_available() and config.kernels in ("auto", *_CHOICES["kernels"]["cuda"])
        device = "cuda" if has_gpu else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch finds no CUDA device on this machine")
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value not in ("auto", *choices[device]):
            allowed = ", ".join(map(repr, choices[device]))
            raise ConfigError(f"{name}={value!r}: must be 'auto' or one of {allowed} on a {device} device")
    dtype, graph = config.dtype, config.graph
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else _stored_dtype(folder)
    if graph == "auto":
        graph = "cuda" if device == "cuda" else "eager"
    is_async = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    speculation = config.speculative_config
    if speculation is not None and speculation.token_cost is None:
        speculation = msgspec.structs.replace(speculation, token_cost=_TOKEN_COSTS[device])
    return msgspec.structs.replace(
        config, device=device, dtype=dtype, graph=graph, async_scheduling=is_async, speculative_config=speculation
    )


def _stored_dtype(folder: Path) -> Literal["float32", "bfloat16"]:
    """What the model's config says that its weights are stored as; everything narrower than fp32 is bf16 here."""
    raw = read_json(folder / "config.json")
    named = [part.get(key) for part in (raw, raw.get("text_config", {})) for key in ("torch_dtype", "dtype")]
    return "float32" if "float32" in named else "bfloat16"


def make_runner(config: EngineConfig, loaded: Loaded, pools: StatePools, device: torch.device) -> LocalRunner:
    """A runner of the model, and of the drafter on the device, over `pools`."""
    _, part = loaded.layout()
    speculation = None
    if loaded.drafter is not None and part is not None:
        speculation = Speculation(loaded.drafter, pools.part(part))
    assert config.graph != "auto", "settings are settled first"
    return LocalRunner(loaded.model, loaded.kernels, pools, device, config.graph, speculation)


def buckets_of(config: EngineConfig, loaded: Loaded, geometry: StateGeometry) -> list[Bucket]:
    """The buckets of the steps that an engine expects to run."""
    is_drafting, vocab_size = loaded.drafter is not None, loaded.model.vocab_size
    return ladder(geometry, config.max_num_batched_tokens, is_drafting=is_drafting, vocab_size=vocab_size)


def capture_graphs(config: EngineConfig, runner: LocalRunner, loaded: Loaded, geometry: StateGeometry) -> None:
    """On a GPU: have the kernels of the steps that an engine expects to run compiled, and these steps captured if it uses CUDA graphs.

    Where `capture` is "use", both is done for each step that is to be captured when it runs first.
    """
    if config.device != "cuda":
        return
    buckets = buckets_of(config, loaded, geometry)
    if config.capture == "start":
        runner.compile(buckets)
    if config.graph == "cuda":
        runner.prepare(buckets)
        if config.capture == "start":
            _capture(runner, buckets)


def _capture(runner: LocalRunner, buckets: Sequence[Bucket]) -> None:
    from rich.console import Console  # noqa: PLC0415 - as below
    from rich.progress import track  # noqa: PLC0415 - an engine on a CPU should not pay for it

    console = Console(stderr=True)
    # The largest first, so that the others find its memory.
    for bucket in track(buckets[::-1], "Capturing graphs", console=console, disable=not console.is_terminal):
        runner.capture(bucket)


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes of a GPU: all of it, what this process holds, and what of that is tensors."""
    if device.type == "cpu":
        return {}
    total = torch.cuda.mem_get_info(device)[1]
    return {
        "device_bytes": total,
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
    }


def tell_memory(memory: Mapping[str, int], device: torch.device) -> None:
    """Say what an engine's memory holds: in the log, and on stderr where it is a GPU's, which is scarce."""
    table = memory_table(memory)
    _log.info("%s", table)
    if device.type != "cpu":
        sys.stderr.write(f"{table}\n")


def is_lost(device: torch.device) -> bool:
    """Whether nothing can run on `device` any more in this process, as after a kernel that read where it must not."""
    if device.type == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def free_bytes(device: torch.device) -> int:
    """Memory of `device` that nobody uses, what torch has put aside for later included."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def cache_budget(config: EngineConfig, loaded: Loaded, max_drafts: int, device: torch.device) -> int:
    """Bytes to size the pools by: those asked for, or on a GPU what the weights and the largest step leave of its share.

    A step's memory depends on its sizes and not on what is in it, so a step of no rows tells how much the largest takes. Raises
    ConfigError if nothing is left.
    """
    if config.cache_bytes is not None:
        return config.cache_bytes
    if device.type == "cpu":
        return DEFAULT_CACHE_BYTES
    layout, _ = loaded.layout()
    length = config.max_model_len or loaded.model.max_length
    small = msgspec.structs.replace(
        config, num_pages=-(-length // config.page_size), num_window_pages=None, num_checkpoints=config.max_num_seqs
    )
    geometry, _ = size_pools(small, layout, loaded.model.max_length, max_drafts, 1, free_bytes(device))
    workspace = _WORKSPACES * step_bytes(config, loaded, geometry, device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed, used = int(config.gpu_memory_utilization * total), total - free
    # These pools hold what running requests need on top of the budget, and one request of the largest length.
    budget = allowed - used - workspace - geometry.num_bytes
    if budget <= 0:
        raise ConfigError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: allows {allowed / 1e9:.2f} of {total / 1e9:.2f} GB, but "
            f"{used / 1e9:.2f} GB are in use (weights, and other processes), steps of {config.max_num_batched_tokens} tokens "
            f"(max_num_batched_tokens) take {workspace / 1e9:.2f} GB, and the state of {config.max_num_seqs} running requests "
            f"(max_num_seqs), one of them of {geometry.max_length} tokens (max_model_len), {geometry.num_bytes / 1e9:.2f} GB"
        )
    return budget


def step_bytes(config: EngineConfig, loaded: Loaded, geometry: StateGeometry, device: torch.device) -> int:
    """Memory of a GPU that the largest step takes beside its pools, which are made for this and let go."""
    buckets = buckets_of(config, loaded, geometry)
    # A step that fits no graph may want more than the largest that does: as many logits as exist at once, and masks of all rows.
    largest, words = buckets[-1], max(bucket.mask_words for bucket in buckets)
    samples = max(largest.samples, min(LOGITS_SLICE, largest.tokens))
    wordy = largest._replace(samples=samples, masks=geometry.num_slots, mask_words=words)
    pools = StatePools(geometry, device)
    runner = make_runner(msgspec.structs.replace(config, graph="eager"), loaded, pools, device)
    runner.compile([wordy])
    # Put aside, not in use at once: what one stream lets go of is nothing that a branch could use, nor the other way round.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.run_inert(wordy)
    return int(torch.cuda.max_memory_reserved(device) - before)

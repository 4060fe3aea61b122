"""Flags of sglang's and vLLM's servers under our names, so that an existing launch line works. Knows names only."""

from typing import Any

import typer
from typer.core import TyperCommand

_MODEL = ""

# Theirs with a value, and ours; no name: the value is MODEL.
RENAMED = {
    "--block-size": "--page-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--num-gpu-blocks-override": "--num-pages",
    "--random-seed": "--seed",
    "--uvicorn-log-level": "--log-level",
}
# Theirs without a value, and what they come to here; nothing: it is so anyway.
REPLACED: dict[str, tuple[str, ...]] = {
    "--disable-cuda-graph": ("--graph", "eager"),
    "--disable-log-requests": (),
    "--disable-overlap-schedule": ("--no-async-scheduling",),
    "--disable-radix-cache": ("--no-enable-prefix-caching",),
    "--enable-cache-report": (),
    "--enable-chunked-prefill": (),
    "--enable-deterministic-inference": (),
    "--enable-metrics": (),
    "--enable-priority-scheduling": (),
    "--enable-prompt-tokens-details": (),
    "--enforce-eager": ("--graph", "eager"),
    "--no-enable-log-requests": (),
    "--skip-server-warmup": (),
    "--trust-remote-code": (),
}
# Theirs that must have this value.
FIXED = {
    "--data-parallel-size": "1",
    "--dp-size": "1",
    "--pipeline-parallel-size": "1",
    "--pp-size": "1",
    "--speculative-eagle-topk": "1",
    "--tensor-parallel-size": "1",
    "--tp": "1",
    "--tp-size": "1",
}


class CommandWithAliases(TyperCommand):
    """A command that also takes the flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: click's context, whose module typer chooses
        """Parse after each foreign flag has become our own."""
        parsed: list[str] = super().parse_args(ctx, ours(args))
        return parsed


def ours(args: list[str]) -> list[str]:
    """Arguments in our own spelling. Raises BadParameter for a value that is not supported here."""
    pending, result = list(args), list[str]()
    while pending:
        arg = pending.pop(0)
        if arg == "--":
            return [*result, arg, *pending]
        name, is_joined, value = arg.partition("=")
        if name in REPLACED and not is_joined:
            result += REPLACED[name]
            continue
        if name not in RENAMED and name not in FIXED:
            result.append(arg)
            continue
        if not is_joined:
            if not pending:
                raise typer.BadParameter("needs a value", param_hint=name)
            value = pending.pop(0)
        if name in RENAMED:
            result += [RENAMED[name], value] if RENAMED[name] else [value]
        elif value != FIXED[name]:
            raise typer.BadParameter(f"{value}: only {FIXED[name]} is supported", param_hint=name)
    return result

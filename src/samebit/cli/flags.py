"""Flags that several commands share, and what commands do with them. Knows names and help texts; loads nothing heavy."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebit.core.errors import SamebitError

if TYPE_CHECKING:
    from samebit.core.config import EngineConfig

# The names are those of vLLM and sglang where they have one.
Model = Annotated[str, typer.Argument(help="nano (bundled), a folder, or a Hugging Face org/name.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Most tokens of a request, prompt and output.")
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Most tokens of a step.")]
NumThreads = Annotated[int | None, typer.Option("--num-threads", help="CPU threads for the model.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, or auto: a GPU if there is one.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Of activations: float32, bfloat16, or auto: as the weights are, on a GPU."),
]
GpuMemory = Annotated[
    float | None, typer.Option("--gpu-memory-utilization", help="Share of a GPU's memory that may be used.")
]
Kernels = Annotated[str | None, typer.Option("--kernels", help="native or torch on a CPU, triton on a GPU, or auto.")]
Graph = Annotated[
    str | None,
    typer.Option(
        "--graph", help="eager; trace: record each step once, then replay; cuda (GPU): graphs captured at start."
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option("--async-scheduling/--no-async-scheduling", help="Plan a step while one runs (default: on a GPU)."),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p")]
TopK = Annotated[int | None, typer.Option("--top-k")]
MinP = Annotated[float | None, typer.Option("--min-p")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes answers repeatable.")]
PageSize = Annotated[int | None, typer.Option("--page-size", help="Tokens of a page.")]
CheckpointInterval = Annotated[
    int | None, typer.Option("--checkpoint-interval", help="Tokens between prefix-cache checkpoints.")
]
NumPages = Annotated[int | None, typer.Option("--num-pages", help="Full-attention pages (default: what fits).")]
NumWindowPages = Annotated[
    int | None, typer.Option("--num-window-pages", help="Sliding-window pages (default: what fits).")
]
NumCheckpoints = Annotated[int | None, typer.Option("--num-checkpoints", help="Prefix-cache checkpoints.")]
CacheBytes = Annotated[int | None, typer.Option("--cache-bytes", help="Memory for pages and checkpoints.")]
PrefixCaching = Annotated[
    bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse common prefixes.")
]


def engine_config(**settings: Any) -> "EngineConfig":  # Any: checked field by field below
    from samebit.core.config import parse_settings  # noqa: PLC0415 - keeps help quick

    config = parse_settings(given(**settings))
    config.validate()
    return config


def given(**flags: Any) -> dict[str, Any]:  # Any: whatever the flags' types are
    """The flags that were given; the others leave the choice to whoever takes them."""
    return {name: value for name, value in flags.items() if value is not None}


@contextlib.contextmanager
def plain_errors(status: int = 1) -> Iterator[None]:
    """What is wrong in one line instead of a traceback, and an exit with `status`."""
    try:
        yield
    except SamebitError as error:
        typer.echo(f"samebit: error: {error}", err=True)
        raise typer.Exit(status) from None

"""run-batch, top, env: what operators run beside a server. Each command loads what it needs when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebit.cli.flags import (
    CacheBytes,
    Device,
    Dtype,
    GpuMemory,
    Kernels,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumThreads,
    engine_config,
    plain_errors,
)
from samebit.cli.speculation import SpeculativeJson, from_json

if TYPE_CHECKING:
    from samebit.server.batch import BatchCounts

Source = Annotated[Path, typer.Option("--input-file", "-i", help="Requests in OpenAI's batch format, one a line.")]
Target = Annotated[
    Path, typer.Option("--output-file", "-o", help="Answers, one a line; what is there is not done again.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def run_batch(
    model: Model,
    source: Source,
    target: Target,
    served_model_name: Annotated[str | None, typer.Option("--served-model-name", help="Name in the requests.")] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    cache_bytes: CacheBytes = None,
    gpu_memory_utilization: GpuMemory = None,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Answer a file of requests with MODEL, without a server. Broken off, it goes on where it was when run again."""
    from rich.console import Console  # noqa: PLC0415 - keeps help quick
    from rich.progress import MofNCompleteColumn, Progress  # noqa: PLC0415 - keeps help quick

    from samebit.server.batch import run_batch as run  # noqa: PLC0415 - keeps help quick

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("requests", total=None)
    try:
        with plain_errors(), bar:
            config = engine_config(
                model=model,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                cache_bytes=cache_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                num_threads=num_threads,
                device=device,
                dtype=dtype,
                kernels=kernels,
                speculative_config=from_json(speculative_config),
            )
            counts = run(
                config,
                source,
                target,
                advance=lambda done, total: bar.update(task, completed=done, total=total),
                served_model_name=served_model_name,
            )
    except KeyboardInterrupt:
        typer.echo("samebit: interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"samebit: {_told(counts)}", err=True)
    raise typer.Exit(1 if counts.num_failed else 0)


def _told(counts: "BatchCounts") -> str:
    parts = [f"{counts.num_answered} answered", f"{counts.num_failed} failed"]
    return ", ".join(parts + ([f"{counts.num_done_before} done before"] if counts.num_done_before else []))


def top(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option("--interval", help="Seconds between looks.", min=0.1)] = 1.0,
    is_once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: AsJson = False,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The server's key, if it has one.")] = None,
) -> None:
    """Watch a server: requests, speed, latencies, cache, guesses, pools. Ctrl-C ends."""
    import json  # noqa: PLC0415 - keeps help quick
    import time  # noqa: PLC0415 - keeps help quick

    from rich.live import Live  # noqa: PLC0415 - keeps help quick

    from samebit.cli.figures import fetch, figures, table  # noqa: PLC0415 - keeps help quick

    with plain_errors():
        before, now = None, fetch(url, api_key)
        if as_json or is_once:
            found = figures(now)
            if as_json:
                typer.echo(json.dumps({"url": url, **found}))
                return
            from rich.console import Console  # noqa: PLC0415 - keeps help quick

            Console().print(table(url, found))
            return
        try:
            with Live(table(url, figures(now)), auto_refresh=False, screen=sys.stdout.isatty()) as live:
                while True:
                    time.sleep(interval)
                    before, now = now, fetch(url, api_key)
                    live.update(table(url, figures(now, before)), refresh=True)
        except KeyboardInterrupt:
            pass


def env(as_json: AsJson = False) -> None:
    """Show what this installation is and what it runs on, for reports. No secrets, no paths."""
    import json  # noqa: PLC0415 - keeps help quick

    from samebit.cli.environment import describe  # noqa: PLC0415 - keeps help quick

    found = describe()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name:{width}}  {value}")

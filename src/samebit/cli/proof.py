"""audit: the promise checked. Loads what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from samebit.cli.flags import (
    CacheBytes,
    Device,
    Dtype,
    Kernels,
    MaxModelLen,
    MaxNumSeqs,
    NumThreads,
    PageSize,
    engine_config,
    plain_errors,
)
from samebit.cli.speculation import SpeculativeJson, from_json


def audit(
    model: Annotated[str | None, typer.Argument(help="nano (bundled), a folder, or a Hugging Face org/name.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Audit the OpenAI-compatible server at http://host:port/v1 instead.")
    ] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help="Play a recorded run instead.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSON Lines as for generate --input, audited too.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Built-in prompts.", min=0)] = 12,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each answer to those.", min=1)] = 32,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Begin no scenario after so long (default: run all).", min=0.0)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Chooses prompts and disturbances.", min=0)] = 0,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    page_size: PageSize = None,
    cache_bytes: CacheBytes = 1 << 28,
    speculative_config: SpeculativeJson = None,
    served_model: Annotated[
        str | None, typer.Option("--model", help="With --url: the model's name there (default: the first).")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="With --url: sent as a bearer token.")] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", help="With --url: most requests.", min=1)] = 400,
    rate: Annotated[float, typer.Option("--rate", help="With --url: most requests a second.", min=0.01)] = 20.0,
    timeout: Annotated[float, typer.Option("--timeout", help="With --url: seconds for an answer.", min=0.1)] = 120.0,
) -> None:
    """Check that answers depend on the request only. Exits with 0: all equal, 1: differences, 2: could not run."""
    if sum(source is not None for source in (model, url, replay)) != 1:
        raise typer.BadParameter("give one of MODEL, --url and --replay", param_hint="MODEL")
    from samebit.audit import command  # noqa: PLC0415 - keeps help quick

    with plain_errors(2):
        command.check_targets(json_file, html_file)
        if url is not None:
            limits = (max_requests, rate, timeout)
            found = command.audit_url(url, model=served_model, api_key=api_key, seed=seed, limits=limits)
            raise typer.Exit(command.finish(found, json_file, html_file))
        from samebit.audit import checkpoint  # noqa: PLC0415 - loads torch, which a server's audit does not need

        if replay is not None:
            played = checkpoint.replay_file(replay)
            if json_file is not None:
                command.write_json(json_file, played)
            raise typer.Exit(0 if played.difference is None else 1)
        config = engine_config(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            checkpoint_interval=page_size,
            cache_bytes=cache_bytes,
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            kernels=kernels,
            speculative_config=from_json(speculative_config),
        )
        sources = checkpoint.Prompts(num_builtin=num_prompts, max_tokens=max_tokens, file=prompts)
        report = checkpoint.audit_checkpoint(config, sources, seed=seed, max_seconds=max_seconds)
        raise typer.Exit(command.finish(report, json_file, html_file))

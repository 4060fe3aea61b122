"""serve, generate, chat: a model put to use. Each command loads what it needs when it runs."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebit.cli.flags import (
    CacheBytes,
    CheckpointInterval,
    Device,
    Dtype,
    GpuMemory,
    Graph,
    Kernels,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxTokens,
    MinP,
    Model,
    NumCheckpoints,
    NumPages,
    NumThreads,
    NumWindowPages,
    PageSize,
    PrefixCaching,
    Seed,
    Temperature,
    TopK,
    TopP,
    engine_config,
    given,
    plain_errors,
)
from samebit.cli.speculation import (
    Algorithm,
    DraftModel,
    NumDraftTokens,
    NumSteps,
    SpeculativeJson,
    from_flags,
    from_json,
)
from samebit.core.errors import SamebitError

if TYPE_CHECKING:
    from samebit.engine.conversation import Conversation

LOG_LEVELS = ("debug", "info", "warning", "error")


def _known_level(level: str) -> str:
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"{level!r} is not one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
    return level


Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="Name in the API (default: MODEL).")]
SeedStream = Annotated[
    int | None, typer.Option("--seed", help="Begins the seeds of requests without one (default: not foreseeable).")
]
ShutdownTimeout = Annotated[
    float, typer.Option("--shutdown-timeout", help="Seconds for open requests after SIGTERM or Ctrl-C.", min=0)
]
MaxQueued = Annotated[int, typer.Option("--max-queued-requests", help="Waiting requests; more get a 503.", min=0)]
MaxBody = Annotated[int, typer.Option("--max-body-bytes", help="Largest request body.", min=1)]
LogLevel = Annotated[str, typer.Option("--log-level", help=", ".join(LOG_LEVELS), callback=_known_level)]


def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedName = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    page_size: PageSize = None,
    checkpoint_interval: CheckpointInterval = None,
    num_pages: NumPages = None,
    num_window_pages: NumWindowPages = None,
    num_checkpoints: NumCheckpoints = None,
    cache_bytes: CacheBytes = None,
    gpu_memory_utilization: GpuMemory = None,
    enable_prefix_caching: PrefixCaching = True,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    graph: Graph = None,
    speculative_config: SpeculativeJson = None,
    speculative_algorithm: Algorithm = None,
    speculative_num_draft_tokens: NumDraftTokens = None,
    speculative_num_steps: NumSteps = None,
    speculative_draft_model_path: DraftModel = None,
    seed: SeedStream = None,
    shutdown_timeout: ShutdownTimeout = 30.0,
    max_queued_requests: MaxQueued = 512,
    max_body_bytes: MaxBody = 8 << 20,
    log_level: LogLevel = "warning",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    counts = (speculative_num_draft_tokens, speculative_num_steps)
    options = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "shutdown_timeout_s": shutdown_timeout,
        "max_queued_requests": max_queued_requests,
        "max_body_bytes": max_body_bytes,
        "seed": seed,
        "log_level": log_level,
    }
    status = _run_server(
        options,
        (speculative_config, speculative_algorithm, *counts, speculative_draft_model_path),
        model=model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        checkpoint_interval=checkpoint_interval,
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        num_checkpoints=num_checkpoints,
        cache_bytes=cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=enable_prefix_caching,
        num_threads=num_threads,
        device=device,
        dtype=dtype,
        kernels=kernels,
        graph=graph,
    )
    raise typer.Exit(status)


def _run_server(options: dict[str, Any], speculation: tuple[Any, ...], **settings: Any) -> int:
    """Any: fields of ServeOptions and of EngineConfig, and what `from_flags` takes."""
    from samebit.engine.launch import num_serving_threads  # noqa: PLC0415 - keeps help quick
    from samebit.server.run import ServeOptions  # noqa: PLC0415 - keeps help quick
    from samebit.server.run import serve as run  # noqa: PLC0415 - keeps help quick

    if settings["num_threads"] is None:
        settings["num_threads"] = num_serving_threads()
    with plain_errors():
        config = engine_config(**settings, speculative_config=from_flags(*speculation))
        return run(config, ServeOptions(**options))


def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given more than once.")] = None,
    source: Annotated[
        Path | None, typer.Option("--input", help='JSON Lines with "prompt" or "messages" and sampling parameters.')
    ] = None,
    target: Annotated[Path | None, typer.Option("--output", help="JSON Lines, one per prompt, in order.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    max_num_seqs: MaxNumSeqs = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Complete prompts in one batch, without a server."""
    if not prompt and source is None:
        raise typer.BadParameter("give --prompt or --input", param_hint="--prompt")
    from samebit.engine.batch_file import (  # noqa: PLC0415 - keeps help quick
        BatchLine,
        check_sampling,
        check_target,
        read_lines,
        run_lines,
        write_outputs,
    )

    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    with plain_errors():
        check_sampling(sampling)
        settings = given(
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            kernels=kernels,
            max_num_seqs=max_num_seqs,
            speculative_config=from_json(speculative_config),
        )
        lines = [BatchLine(prompt=text) for text in prompt or []] + ([] if source is None else read_lines(source))
        if target is not None:
            check_target(target)
        from samebit.engine.llm import LLM  # noqa: PLC0415 - mistakes are told before torch is loaded

        llm = LLM(model, **settings)
        outputs = run_lines(llm, lines, sampling, show_progress=len(lines) > 1 and sys.stderr.isatty())
        if target is not None:
            write_outputs(target, outputs)
            return
    for output in outputs:
        for sample in output.outputs:
            typer.echo(sample.text)


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="A message that stands before the others.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    max_model_len: MaxModelLen = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Talk to MODEL in the terminal. /reset begins anew, /quit or Ctrl-D ends."""
    import msgspec  # noqa: PLC0415 - keeps help quick

    from samebit.engine.conversation import Conversation  # noqa: PLC0415 - keeps help quick

    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    with plain_errors():
        config = engine_config(
            model=model,
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            kernels=kernels,
            max_model_len=max_model_len,
            speculative_config=from_json(speculative_config),
        )
        conversation = Conversation(config, system=system, seed=seed)
        conversation.set_params(msgspec.structs.replace(conversation.params, **sampling))
    typer.echo(f"{model}: /reset begins anew, /quit ends", err=True)
    while (text := _read_line("> ")) not in (None, "/quit"):
        if text == "/reset":
            conversation.reset()
        elif text:
            _show_answer(conversation, text)


def _show_answer(conversation: "Conversation", text: str) -> None:
    """Print an answer as it comes. Ctrl-C breaks it off; a message that is refused is no reason to leave."""
    try:
        with contextlib.closing(conversation.say(text)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except SamebitError as error:
        typer.echo(f"error: {error}", err=True)
    typer.echo()


def _read_line(prompt: str) -> str | None:
    """A line from the terminal, without blanks around it; None at its end."""
    try:
        return input(prompt if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None

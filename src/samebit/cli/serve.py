"""serve: a model behind an HTTP API. Loads what it needs when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from samebit.cli.flags import (
    AsyncScheduling,
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
    Model,
    NumCheckpoints,
    NumPages,
    NumThreads,
    NumWindowPages,
    PageSize,
    PrefixCaching,
    engine_config,
    plain_errors,
)
from samebit.cli.speculation import (
    Algorithm,
    DraftModel,
    NumDraftTokens,
    NumSteps,
    SpeculativeJson,
    from_flags,
)

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
MaxQueuedTokens = Annotated[
    int, typer.Option("--max-queued-tokens", help="Tokens of the prompts of all open requests; more get a 503.", min=1)
]
MaxRestarts = Annotated[
    int,
    typer.Option("--max-engine-restarts", help="Crashes of the engine within 10 minutes that are made good.", min=0),
]
PingInterval = Annotated[
    float, typer.Option("--sse-ping-interval", help="Seconds until a silent stream gets a comment; 0: never.", min=0)
]
PriorityAging = Annotated[
    int | None,
    typer.Option("--priority-aging-steps", help="Steps of waiting that weigh as much as one level of priority."),
]
AuditRate = Annotated[
    float | None,
    typer.Option("--audit-rate", help="Share of requests computed a second time, cold, and compared.", min=0, max=1),
]
MetricsCompat = Annotated[
    str, typer.Option("--metrics-compat", help="Show metrics also as: sglang, vllm, or both with a comma.")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", help="A key that clients must send; may be given more than once. See also --api-key-file."
    ),
]
ApiKeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="A file with one key a line.")]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-api-key", help="The key for what changes the server: cache, weights, all requests."),
]
AllowedOrigins = Annotated[
    str, typer.Option("--allowed-origins", help="Origins of web pages that may use the server, with commas; *: all.")
]
AllowedHosts = Annotated[
    str, typer.Option("--allowed-hosts", help="Names of this server besides localhost, with commas; *: any.")
]
HasPage = Annotated[bool, typer.Option("--ui/--no-ui", help="A page at / that shows what the server does.")]
TracesEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-traces-endpoint",
        envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="URL that takes a span of each request (OTLP over HTTP). Needs the extra otel.",
    ),
]
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
    async_scheduling: AsyncScheduling = None,
    speculative_config: SpeculativeJson = None,
    speculative_algorithm: Algorithm = None,
    speculative_num_draft_tokens: NumDraftTokens = None,
    speculative_num_steps: NumSteps = None,
    speculative_draft_model_path: DraftModel = None,
    seed: SeedStream = None,
    shutdown_timeout: ShutdownTimeout = 30.0,
    max_queued_requests: MaxQueued = 512,
    max_queued_tokens: MaxQueuedTokens = 1 << 22,
    max_body_bytes: MaxBody = 8 << 20,
    max_engine_restarts: MaxRestarts = 3,
    priority_aging_steps: PriorityAging = None,
    audit_rate: AuditRate = None,
    sse_ping_interval: PingInterval = 15.0,
    metrics_compat: MetricsCompat = "",
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    admin_api_key: AdminKey = None,
    allowed_origins: AllowedOrigins = "",
    allowed_hosts: AllowedHosts = "",
    ui: HasPage = True,
    otlp_traces_endpoint: TracesEndpoint = None,
    log_level: LogLevel = "warning",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API. Flags of sglang's and vLLM's servers are taken, too."""
    counts = (speculative_num_draft_tokens, speculative_num_steps)
    options = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "shutdown_timeout_s": shutdown_timeout,
        "max_queued_requests": max_queued_requests,
        "max_queued_tokens": max_queued_tokens,
        "max_body_bytes": max_body_bytes,
        "max_engine_restarts": max_engine_restarts,
        "sse_ping_interval_s": sse_ping_interval,
        "metrics_compat": _listed(metrics_compat),
        "api_keys": tuple(api_key or ()),
        "api_key_file": None if api_key_file is None else str(api_key_file),
        "admin_api_key": admin_api_key,
        "allowed_origins": _listed(allowed_origins),
        "allowed_hosts": _listed(allowed_hosts),
        "has_page": ui,
        "otlp_traces_endpoint": otlp_traces_endpoint,
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
        async_scheduling=async_scheduling,
        priority_aging_steps=priority_aging_steps,
        audit_rate=audit_rate,
    )
    raise typer.Exit(status)


def _listed(text: str) -> tuple[str, ...]:
    """Values with commas between them, or in a JSON list, as vLLM has them."""
    pieces = text.strip().removeprefix("[").removesuffix("]").split(",")
    return tuple(value for piece in pieces if (value := piece.strip().strip("\"'").lower()))


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

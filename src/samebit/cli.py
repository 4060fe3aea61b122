"""The command line: serve, generate, chat, audit, bench, train. Knows flags and files; each command loads what it needs when it runs."""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebit.core.errors import SamebitError

if TYPE_CHECKING:
    from samebit.core.config import EngineConfig
    from samebit.engine.conversation import Conversation

LOG_LEVELS = ("debug", "info", "warning", "error")

app = typer.Typer(
    name="samebit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(no_args_is_help=True, help="Measure an engine.")
app.add_typer(bench, name="bench")
train = typer.Typer(no_args_is_help=True, help="Train a small model from what is installed here.")
app.add_typer(train, name="train")

# Flags that several commands share. The names are those of vLLM and sglang where they have one.
Model = Annotated[str, typer.Argument(help="nano (bundled), a folder, or a Hugging Face org/name.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Most tokens of a request, prompt and output.")
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Most tokens of a step.")]
NumThreads = Annotated[int | None, typer.Option("--num-threads", help="CPU threads for the model.")]
Kernels = Annotated[str | None, typer.Option("--kernels", help="native, torch or auto.")]
Graph = Annotated[str | None, typer.Option("--graph", help="eager, or trace: record each step once, then replay.")]
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
CorpusFolder = Annotated[Path, typer.Argument(help="A prepared corpus.")]
RunFolder = Annotated[Path, typer.Argument(help="State and history of the run.")]
Recipe = Annotated[str, typer.Option("--recipe", help="nano, or toy: the whole path in a minute on a CPU.")]
LogLevel = Annotated[str, typer.Option("--log-level", help=", ".join(LOG_LEVELS))]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"samebit {importlib.metadata.version('samebit')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Inference whose tokens and logprobs depend on the request and the weights only, bit for bit."""


@app.command()
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
    enable_prefix_caching: PrefixCaching = True,
    num_threads: NumThreads = None,
    kernels: Kernels = None,
    graph: Graph = None,
    seed: SeedStream = None,
    shutdown_timeout: ShutdownTimeout = 30.0,
    max_queued_requests: MaxQueued = 512,
    max_body_bytes: MaxBody = 8 << 20,
    log_level: LogLevel = "warning",
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    from samebit.engine.launch import num_serving_threads  # noqa: PLC0415 - keeps help quick
    from samebit.server.run import ServeOptions  # noqa: PLC0415 - keeps help quick
    from samebit.server.run import serve as run  # noqa: PLC0415 - keeps help quick

    if log_level not in LOG_LEVELS:
        raise typer.BadParameter(f"{log_level!r} is not one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
    with _plain_errors():
        config = _config(
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
            enable_prefix_caching=enable_prefix_caching,
            num_threads=num_serving_threads() if num_threads is None else num_threads,
            kernels=kernels,
            graph=graph,
        )
        options = ServeOptions(
            host=host,
            port=port,
            served_model_name=served_model_name,
            shutdown_timeout_s=shutdown_timeout,
            max_queued_requests=max_queued_requests,
            max_body_bytes=max_body_bytes,
            seed=seed,
            log_level=log_level,
        )
        status = run(config, options)
    raise typer.Exit(status)


@app.command()
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
    kernels: Kernels = None,
    max_num_seqs: MaxNumSeqs = None,
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

    sampling = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    with _plain_errors():
        check_sampling(sampling)
        lines = [BatchLine(prompt=text) for text in prompt or []] + ([] if source is None else read_lines(source))
        if target is not None:
            check_target(target)
        from samebit.engine.llm import LLM  # noqa: PLC0415 - mistakes are told before torch is loaded

        llm = LLM(model, **_given(num_threads=num_threads, kernels=kernels, max_num_seqs=max_num_seqs))
        outputs = run_lines(llm, lines, sampling, show_progress=len(lines) > 1 and sys.stderr.isatty())
        if target is not None:
            write_outputs(target, outputs)
            return
    for output in outputs:
        for sample in output.outputs:
            typer.echo(sample.text)


@app.command()
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
    kernels: Kernels = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Talk to MODEL in the terminal. /reset begins anew, /quit or Ctrl-D ends."""
    import msgspec  # noqa: PLC0415 - keeps help quick

    from samebit.engine.conversation import Conversation  # noqa: PLC0415 - keeps help quick

    sampling = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    with _plain_errors():
        config = _config(model=model, num_threads=num_threads, kernels=kernels, max_model_len=max_model_len)
        conversation = Conversation(config, system=system, seed=seed)
        conversation.set_params(msgspec.structs.replace(conversation.params, **sampling))
    typer.echo(f"{model}: /reset begins anew, /quit ends", err=True)
    while (text := _read_line("> ")) not in (None, "/quit"):
        if text == "/reset":
            conversation.reset()
        elif text:
            _show_answer(conversation, text)


@app.command()
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
    seed: Annotated[int, typer.Option("--seed", help="Chooses prompts and disturbances.", min=0)] = 0,
    num_threads: NumThreads = None,
    kernels: Kernels = None,
    max_model_len: MaxModelLen = None,
    page_size: PageSize = None,
    cache_bytes: CacheBytes = 1 << 28,
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

    with _plain_errors(2):
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
        config = _config(
            model=model,
            max_model_len=max_model_len,
            page_size=page_size,
            checkpoint_interval=page_size,
            cache_bytes=cache_bytes,
            num_threads=num_threads,
            kernels=kernels,
        )
        sources = checkpoint.Prompts(num_builtin=num_prompts, max_tokens=max_tokens, file=prompts)
        report = checkpoint.audit_checkpoint(config, sources, seed=seed)
        raise typer.Exit(command.finish(report, json_file, html_file))


@bench.command()
def recall(
    model: Model = "nano",
    num_problems: Annotated[int, typer.Option("--problems", help="Dialogues of 40 turns each.", min=1)] = 70,
    num_threads: NumThreads = None,
    kernels: Kernels = None,
) -> None:
    """Ask for facts late in long dialogues, with and without the prefix cache; the answers must not differ."""
    from samebit.bench import recall as arms  # noqa: PLC0415 - loads torch

    with _plain_errors():
        settings = _given(num_threads=num_threads, kernels=kernels)
        scores = arms.compare_cache(model, num_problems, settings)
    typer.echo(arms.table(scores))
    raise typer.Exit(int(scores[1].num_changed(scores[0]) > 0))


@train.command()
def corpus(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    site: Annotated[list[Path] | None, typer.Option(help="One more site-packages folder to read.")] = None,
    package: Annotated[list[str] | None, typer.Option(help="Only this one; may be given more than once.")] = None,
    max_files: Annotated[int | None, typer.Option(help="Most files of a package.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to train on.", min=1)] = 100_000_000,
    recipe: Recipe = "nano",
) -> None:
    """Prepare a corpus from permissively licensed packages and the standard library."""
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with _plain_errors():
        command.prepare_corpus(folder, site or [], package or [], max_files, max_tokens, recipe)


@train.command()
def nano(
    data: CorpusFolder,
    run: RunFolder,
    stage: Annotated[int, typer.Option(help="1, 2, ...: each goes on from the one before it.", min=1)],
    recipe: Recipe = "nano",
    start: Annotated[Path | None, typer.Option(help="A checkpoint to start from where RUN is empty.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that write dialogues.", min=0)] = None,
    seconds: Annotated[float | None, typer.Option(help="Time of the stage (default: the recipe's).", min=1)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Run a stage of a recipe: train for its time, save, evaluate."""
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with _plain_errors():
        command.run_stage(data, run, stage, recipe, start=start, workers=workers, seconds=seconds, seed=seed)


@train.command()
def export(data: CorpusFolder, run: RunFolder, folder: Path, recipe: Recipe = "nano") -> None:
    """Write the trained model to FOLDER as a checkpoint that can be served."""
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with _plain_errors():
        command.export_run(data, run, folder, recipe)


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


def _config(**settings: Any) -> "EngineConfig":  # Any: checked field by field below
    from samebit.core.config import parse_settings  # noqa: PLC0415 - keeps help quick

    config = parse_settings(_given(**settings))
    config.validate()
    return config


def _given(**flags: Any) -> dict[str, Any]:  # Any: whatever the flags' types are
    """The flags that were given; the others leave the choice to whoever takes them."""
    return {name: value for name, value in flags.items() if value is not None}


@contextlib.contextmanager
def _plain_errors(status: int = 1) -> Iterator[None]:
    """What is wrong in one line instead of a traceback, and an exit with `status`."""
    try:
        yield
    except SamebitError as error:
        typer.echo(f"samebit: error: {error}", err=True)
        raise typer.Exit(status) from None

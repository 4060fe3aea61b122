"""bench: throughput, latency, serve, plot, recall. Flags have vLLM's names where it has them; each command loads what it needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from samebit.cli.flags import (
    CacheBytes,
    Device,
    Dtype,
    GpuMemory,
    Graph,
    Kernels,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumThreads,
    PrefixCaching,
    engine_config,
    given,
    plain_errors,
)
from samebit.cli.speculation import SpeculativeJson, from_json

bench = typer.Typer(no_args_is_help=True, help="Measure an engine, or any server that speaks OpenAI's API.")

DatasetName = Annotated[
    str, typer.Option("--dataset-name", help="random, prefix_repetition, multi_turn, or code: the standard library's.")
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Requests; in multi_turn conversations.")]
DataSeed = Annotated[int, typer.Option("--seed", help="Chooses all texts, lengths and arrivals.")]
InputLen = Annotated[int, typer.Option("--random-input-len", "--input-len", help="Tokens of a prompt (random, code).")]
OutputLen = Annotated[int, typer.Option("--random-output-len", "--output-len", help="Tokens of an answer.")]
RangeRatio = Annotated[
    float, typer.Option("--random-range-ratio", help="r: lengths are spread over [length (1-r), length (1+r)].")
]
PrefixLen = Annotated[int, typer.Option("--random-prefix-len", help="Tokens that begin every prompt (random).")]
SharedLen = Annotated[int, typer.Option("--prefix-repetition-prefix-len", help="Tokens that a group shares.")]
SuffixLen = Annotated[int, typer.Option("--prefix-repetition-suffix-len", help="Tokens behind them.")]
NumPrefixes = Annotated[int, typer.Option("--prefix-repetition-num-prefixes", help="Groups.")]
RepetitionOutputLen = Annotated[int, typer.Option("--prefix-repetition-output-len", help="Tokens of an answer.")]
SystemLen = Annotated[int, typer.Option("--multi-turn-system-len", help="Tokens of the system prompt that all share.")]
NumTurns = Annotated[int, typer.Option("--multi-turn-num-turns", help="Turns of a conversation.")]
TurnInputLen = Annotated[int, typer.Option("--multi-turn-input-len", help="Tokens of what a user says in a turn.")]
TurnOutputLen = Annotated[int, typer.Option("--multi-turn-output-len", help="Tokens of an answer in a turn.")]
Metrics = Annotated[str, typer.Option("--percentile-metrics", help="What is told, of ttft,tpot,itl,e2el.")]
Percentiles = Annotated[str, typer.Option("--metric-percentiles", help="Which percentiles, beside the median.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", "--output-json", "--result-filename", help="Store the record here.")
]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Store it under a name made of kind, label and date.")]
ResultDir = Annotated[Path | None, typer.Option("--result-dir", help="Where the record goes.")]
SaveDetailed = Annotated[bool, typer.Option("--save-detailed", help="With the times of every request.")]
Label = Annotated[str, typer.Option("--label", help="Name of the record in plots (default: the model's).")]
NoBar = Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar (there is none but on a terminal).")]

ALL_METRICS = "ttft,tpot,itl,e2el"
ALL_PERCENTILES = "90,95,99"


class ManyGoals(TyperCommand):
    """A command whose --goodput takes all that follows up to the next flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: click's context, whose module typer chooses
        """Parse after each further goal has a flag of its own."""
        spread: list[str] = []
        is_open = False
        for arg in args:
            is_flag = arg.startswith("-")
            spread += ["--goodput", arg] if is_open and not is_flag and spread[-1] != "--goodput" else [arg]
            is_open = arg == "--goodput" or (is_open and not is_flag)
        parsed: list[str] = super().parse_args(ctx, spread)
        return parsed


@bench.command()
def throughput(
    model: Model,
    dataset_name: DatasetName = "random",
    num_prompts: NumPrompts = 100,
    seed: DataSeed = 0,
    random_input_len: InputLen = 512,
    random_output_len: OutputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    random_prefix_len: PrefixLen = 0,
    prefix_repetition_prefix_len: SharedLen = 256,
    prefix_repetition_suffix_len: SuffixLen = 256,
    prefix_repetition_num_prefixes: NumPrefixes = 10,
    prefix_repetition_output_len: RepetitionOutputLen = 128,
    multi_turn_system_len: SystemLen = 1024,
    multi_turn_num_turns: NumTurns = 8,
    multi_turn_input_len: TurnInputLen = 64,
    multi_turn_output_len: TurnOutputLen = 64,
    num_warmups: Annotated[int, typer.Option("--num-warmups", help="Whole runs before, of other text.", min=0)] = 1,
    percentile_metrics: Metrics = ALL_METRICS,
    metric_percentiles: Percentiles = ALL_PERCENTILES,
    output: Output = None,
    save_result: SaveResult = False,
    result_dir: ResultDir = None,
    save_detailed: SaveDetailed = False,
    label: Label = "",
    disable_tqdm: NoBar = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    cache_bytes: CacheBytes = None,
    gpu_memory_utilization: GpuMemory = None,
    enable_prefix_caching: PrefixCaching = True,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    graph: Graph = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Answer all requests at once with an engine in this process: tokens a second, steps, latencies."""
    _offline("throughput", locals())


@bench.command()
def latency(
    model: Model,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Requests at once.", min=1)] = 8,
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of a prompt.")] = 32,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens of an answer.")] = 128,
    num_iters: Annotated[int, typer.Option("--num-iters", help="Batches measured, each of other text.", min=1)] = 30,
    num_iters_warmup: Annotated[int, typer.Option("--num-iters-warmup", help="Batches before.", min=0)] = 2,
    seed: DataSeed = 0,
    percentile_metrics: Metrics = ALL_METRICS,
    metric_percentiles: Percentiles = ALL_PERCENTILES,
    output: Output = None,
    save_result: SaveResult = False,
    result_dir: ResultDir = None,
    save_detailed: SaveDetailed = False,
    label: Label = "",
    disable_tqdm: NoBar = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    cache_bytes: CacheBytes = None,
    gpu_memory_utilization: GpuMemory = None,
    enable_prefix_caching: PrefixCaching = True,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    graph: Graph = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Time batches of one size and length: first token, each further token, the whole answer."""
    flags = locals()
    flags |= {
        "num_prompts": batch_size,
        "random_input_len": input_len,
        "random_output_len": output_len,
        "num_warmups": num_iters_warmup,
    }
    _offline("latency", flags)


@bench.command(cls=ManyGoals)
def serve(
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Where the server listens, with or without /v1.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Instead, with --port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Instead, with --host.", min=1, max=65535)] = 8000,
    backend: Annotated[str, typer.Option("--backend", help="openai (completions) or openai-chat.")] = "openai",
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="Path, if it is not the usual one.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's name there (default: the first).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Model whose tokenizer measures texts (default: ask the server).")
    ] = None,
    dataset_name: DatasetName = "random",
    num_prompts: NumPrompts = 100,
    seed: DataSeed = 0,
    random_input_len: InputLen = 1024,
    random_output_len: OutputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    random_prefix_len: PrefixLen = 0,
    prefix_repetition_prefix_len: SharedLen = 256,
    prefix_repetition_suffix_len: SuffixLen = 256,
    prefix_repetition_num_prefixes: NumPrefixes = 10,
    prefix_repetition_output_len: RepetitionOutputLen = 128,
    multi_turn_system_len: SystemLen = 1024,
    multi_turn_num_turns: NumTurns = 8,
    multi_turn_input_len: TurnInputLen = 64,
    multi_turn_output_len: TurnOutputLen = 64,
    request_rate: Annotated[
        str, typer.Option("--request-rate", help="Arrivals a second; inf: all at once. Several (1,2,inf): a sweep.")
    ] = "inf",
    burstiness: Annotated[
        str, typer.Option("--burstiness", help="1: Poisson arrivals; less: in bursts; inf: at equal distances.")
    ] = "1",
    max_concurrency: Annotated[
        str | None, typer.Option("--max-concurrency", help="Most conversations at once. Several (1,8,64): a sweep.")
    ] = None,
    num_warmups: Annotated[int, typer.Option("--num-warmups", help="Further requests before all others.", min=0)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, where the server knows the field.")
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.", min=0.0)] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option("--extra-body", help="Fields of every request.", metavar="JSON")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token, never recorded.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", help="NAME=VALUE, never recorded; may be given more than once.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for an answer.", min=0.1)] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Limits in ms, as in ttft:500 tpot:50 (also: e2el).")
    ] = None,
    percentile_metrics: Metrics = ALL_METRICS,
    metric_percentiles: Percentiles = ALL_PERCENTILES,
    output: Output = None,
    save_result: SaveResult = False,
    result_dir: ResultDir = None,
    save_detailed: SaveDetailed = False,
    label: Label = "",
    disable_tqdm: NoBar = False,
) -> None:
    """Load a server that speaks OpenAI's API, and time it. Exits with 0, 1: requests failed, 2: could not run."""
    flags = locals()
    from samebit.bench import command  # noqa: PLC0415 - keeps help quick

    _end(lambda: command.server(flags))


@bench.command()
def plot(
    target: Annotated[Path, typer.Argument(help="File to draw, as in speed.svg.")],
    records: Annotated[list[Path], typer.Argument(help="Records, the first drawn first.")],
    label: Annotated[
        list[str] | None, typer.Option("--label", help="Names in the legend, one a record, in their order.")
    ] = None,
) -> None:
    """Draw records over one another, before and after."""
    from samebit.bench import command  # noqa: PLC0415 - keeps help quick

    with plain_errors(2):
        command.plot(target, records, label or [])
    typer.echo(target)


@bench.command()
def recall(
    model: Model = "nano",
    num_problems: Annotated[int, typer.Option("--problems", help="Dialogues of 40 turns each.", min=1)] = 70,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
) -> None:
    """Ask for facts late in long dialogues, with and without the prefix cache; the answers must not differ."""
    from samebit.bench import recall as arms  # noqa: PLC0415 - loads torch

    with plain_errors():
        settings = given(num_threads=num_threads, device=device, dtype=dtype, kernels=kernels)
        scores = arms.compare_cache(model, num_problems, settings)
    typer.echo(arms.table(scores))
    raise typer.Exit(int(scores[1].num_changed(scores[0]) > 0))


def _offline(kind: str, flags: dict[str, Any]) -> None:  # Any: whatever the flags' types are
    from samebit.bench import command  # noqa: PLC0415 - keeps help quick
    from samebit.core.config import EngineConfig  # noqa: PLC0415 - keeps help quick

    def run() -> int:
        settings = {name: value for name, value in flags.items() if name in EngineConfig.__struct_fields__}
        # The workload's seed: the engine's chooses nothing here.
        settings |= {"seed": 0, "speculative_config": from_json(flags["speculative_config"])}
        return command.offline(kind, engine_config(**settings), flags)

    _end(run)


def _end(run: Callable[[], int]) -> None:
    """Exit with the status of `run`; 2 where it could not run at all."""
    try:
        with plain_errors(2):
            status = run()
    except KeyboardInterrupt:
        typer.echo("samebit: interrupted before anything was measured", err=True)
        status = 130
    raise typer.Exit(status)

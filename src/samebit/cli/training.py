"""train: corpus, nano, drafter, export, assess, assess-drafter, card. Each command loads what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from samebit.cli.flags import Model, NumThreads, plain_errors

train = typer.Typer(no_args_is_help=True, help="Train a small model from what is installed here.")

CorpusFolder = Annotated[Path, typer.Argument(help="A prepared corpus.")]
RunFolder = Annotated[Path, typer.Argument(help="State and history of the run.")]
Recipe = Annotated[str, typer.Option("--recipe", help="nano, or toy: the whole path in a minute on a CPU.")]


@train.command()
def corpus(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    site: Annotated[list[Path] | None, typer.Option(help="Site-packages to read instead of the environment's.")] = None,
    package: Annotated[list[str] | None, typer.Option(help="Only this one; may be given more than once.")] = None,
    max_files: Annotated[int | None, typer.Option(help="Most files of a package.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to train on.", min=1)] = 100_000_000,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model whose tokenizer is taken, for its drafters (default: one is trained).")
    ] = None,
    recipe: Recipe = "nano",
) -> None:
    """Prepare a corpus from permissively licensed packages and the standard library."""
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with plain_errors():
        command.prepare_corpus(folder, site or [], package or [], max_files, max_tokens, recipe, tokenizer)


@train.command()
def nano(
    data: Annotated[Path | None, typer.Argument(help="A prepared corpus.")] = None,
    run: Annotated[Path | None, typer.Argument(help="State and history of the run.")] = None,
    stage: Annotated[int | None, typer.Option(help="1, 2, ...: each goes on from the one before it.", min=1)] = None,
    recipe: Recipe = "nano",
    start: Annotated[Path | None, typer.Option(help="A checkpoint to start from where RUN is empty.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that write dialogues.", min=0)] = None,
    seconds: Annotated[float | None, typer.Option(help="Time of the stage (default: the recipe's).", min=1)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Instead: the whole path at toy size, corpus and export included.")
    ] = False,
) -> None:
    """Run a stage of a recipe: train for its time, save, evaluate."""
    if smoke:
        from samebit.train import smoke as path  # noqa: PLC0415 - loads torch

        with plain_errors():
            raise typer.Exit(0 if path.smoke(data, run) else 1)
    if data is None or run is None or stage is None:
        raise typer.BadParameter("give DATA, RUN and --stage, or --smoke", param_hint="DATA")
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with plain_errors():
        command.run_stage(data, run, stage, recipe, start=start, workers=workers, seconds=seconds, seed=seed)


@train.command()
def drafter(
    target: Model,
    data: CorpusFolder,
    run: RunFolder,
    method: Annotated[
        list[str] | None,
        typer.Option(help="dflash, dspark or mtp; may be given more than once (default: the first two)."),
    ] = None,
    recipe: Recipe = "nano",
    seconds: Annotated[float | None, typer.Option(help="Time of the training (default: the recipe's).", min=1)] = None,
    own_share: Annotated[
        float | None, typer.Option(help="Share of steps on text of TARGET's own (default: the recipe's).", min=0, max=1)
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="A drafter's folder to start from where RUN/METHOD is empty; for one METHOD.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that write dialogues.", min=0)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train drafters for TARGET side by side, measure and write them to RUN/METHOD/model."""
    from samebit.train.drafters import command  # noqa: PLC0415 - loads torch

    with plain_errors():
        command.train_drafters(
            target, data, run, method or ["dflash", "dspark"], recipe,
            seconds=seconds, own_share=own_share, start=start, workers=workers, seed=seed,
        )  # fmt: skip


@train.command()
def export(data: CorpusFolder, run: RunFolder, folder: Path, recipe: Recipe = "nano") -> None:
    """Write the trained model to FOLDER as a checkpoint that can be served."""
    from samebit.train import command  # noqa: PLC0415 - loads torch

    with plain_errors():
        command.export_run(data, run, folder, recipe)


@train.command()
def assess(
    model: Model,
    data: CorpusFolder,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the counts here, for `card`.")] = None,
    probes: Annotated[int, typer.Option(help="Probes a recall cell; four times that of all others.", min=1)] = 50,
    num_threads: NumThreads = None,
) -> None:
    """Measure what MODEL can do by generating with the engine, and print it as Markdown."""
    from samebit.train import assess as arms  # noqa: PLC0415 - loads torch

    with plain_errors():
        typer.echo(arms.run(model, data, json_file, probes=probes, num_threads=num_threads))


@train.command()
def assess_drafter(
    target: Model,
    drafter: Annotated[
        str,
        typer.Argument(help="A drafter's folder, or a method: mtp, ngram, or dflash or dspark where one is bundled."),
    ],
    data: CorpusFolder,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    recipe: Recipe = "nano",
    num_threads: NumThreads = None,
) -> None:
    """Measure with the engine how many tokens a step DRAFTER gives for TARGET, and print it as Markdown."""
    from samebit.train.drafters import assess as arms  # noqa: PLC0415 - loads torch

    with plain_errors():
        typer.echo(arms.run(target, drafter, data, recipe, json_file, num_threads=num_threads))


@train.command()
def card(
    model: Annotated[Path, typer.Argument(help="An exported checkpoint.")],
    data: CorpusFolder,
    history: Annotated[Path, typer.Argument(help="The run's history.json.")],
    assessment: Annotated[Path | None, typer.Option(help="What `assess --json` wrote.")] = None,
) -> None:
    """Write MODEL's README.md anew: shape, training, measurements, sources with their licences."""
    from samebit.train.export import write_card  # noqa: PLC0415 - loads torch

    with plain_errors():
        write_card(model, data, history, assessment)

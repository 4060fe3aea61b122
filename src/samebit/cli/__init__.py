"""The command line, `samebit`. Knows which commands there are; each loads what it needs when it runs, so that help is quick."""

import importlib.metadata
from typing import Annotated

import typer

from samebit.cli.aliases import CommandWithAliases
from samebit.cli.bench import bench
from samebit.cli.operating import env, run_batch, top
from samebit.cli.proof import audit
from samebit.cli.serve import serve
from samebit.cli.serving import chat, generate
from samebit.cli.training import train

app = typer.Typer(
    name="samebit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=CommandWithAliases)(serve)
for command in (generate, chat, run_batch, top, audit, env):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")


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

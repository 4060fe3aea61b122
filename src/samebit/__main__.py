"""`python -m samebit`: the command line."""

from samebit.cli import app

app()

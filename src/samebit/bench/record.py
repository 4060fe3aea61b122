"""The record of a benchmark, as JSON: what was run, on what, and what came out. Writes and reads files; measures nothing."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from samebit.bench.rows import Row
from samebit.bench.summary import Summary
from samebit.core.errors import InvalidRequestError
from samebit.engine.batch_file import write_target

FORMAT = "samebit-bench-1"
_SECRETS = ("--api-key", "--header")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep: its settings, its figures, and, if they are wanted, its requests."""

    settings: dict[str, Any]  # Any: numbers and texts
    summary: Summary
    is_complete: bool = True
    requests: list[Row] | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All of a command's runs. `server` and `environment` say what answered and what measured."""

    format: str = FORMAT
    kind: str
    label: str
    command: str
    seed: int
    settings: dict[str, Any]  # Any: numbers and texts
    environment: dict[str, Any]  # Any: as environment.py makes it
    server: dict[str, Any] | None = None  # Any: what the server says of itself
    is_complete: bool = True
    runs: list[Run]


def without_credentials(text: str) -> str:
    """A URL, or a text with one, without the user, password and query that it may hold."""
    return re.sub(r"(?<=://)[^/?#\s]*(?=@)|(?<=\?)\S*$", "***", text) if "://" in text else text


def command_line(arguments: Sequence[str] | None = None) -> str:
    """How this program was called, without what is secret."""
    shown = ["samebit"]
    is_secret = False
    for argument in sys.argv[1:] if arguments is None else arguments:
        shown.append("***" if is_secret else _shown(argument))
        is_secret = argument in _SECRETS
    return " ".join(text if re.fullmatch(r"[\w@%+=:,./*-]+", text) else repr(text) for text in shown)


def _shown(argument: str) -> str:
    name, separator, _ = argument.partition("=")
    return f"{name}=***" if name in _SECRETS and separator else without_credentials(argument)


def write_record(path: Path, record: Record) -> None:
    """Write it, indented. Raises InvalidRequestError if the file cannot be written."""
    data = msgspec.json.encode(_plain(msgspec.to_builtins(record)))
    write_target(path, msgspec.json.format(data, indent=1) + b"\n")


def read_record(path: Path) -> Record:
    """What `write_record` wrote. Raises InvalidRequestError for any other file."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: no record of samebit bench ({error})") from error
    if record.format != FORMAT:
        raise InvalidRequestError(f"{path}: format {record.format!r}: must be {FORMAT}")
    return record


def _plain(value: Any) -> Any:  # Any: JSON
    """Floats to a millionth; JSON has no infinity, which is written as text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else round(value, 6)
    return value

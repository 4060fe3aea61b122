"""Batches of prompts in JSON Lines files: one prompt or conversation a line, with its own sampling parameters.

Knows the offline API. Does not know command lines.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from samebit.core.errors import InvalidRequestError
from samebit.core.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from samebit.engine.llm import LLM


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line: `prompt` (text or token ids) or `messages`, and sampling parameters by name."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # Any: JSON, whose shape is the template's business
    sampling: dict[str, Any] = {}  # Any: values of SamplingParams


def read_lines(path: Path) -> list[BatchLine]:
    """The lines of a file; empty ones are passed over. Raises InvalidRequestError with the number of a wrong one."""
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error
    return [_line(row, f"{path}, line {number}") for number, row in enumerate(rows, start=1) if row.strip()]


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if `sampling` (Any: values of SamplingParams) could not be asked for."""
    try:
        msgspec.convert(sampling, SamplingParams, str_keys=True).validate()
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from error


def run_lines(
    llm: "LLM", lines: Sequence[BatchLine], sampling: Mapping[str, Any], *, show_progress: bool
) -> list[RequestOutput]:
    """Complete all lines in one batch, in order.

    `sampling` holds parameters for lines that do not give them; what neither gives is as the checkpoint recommends.
    Any: values of SamplingParams, which `check_sampling` has accepted. Raises InvalidRequestError.
    """
    common = msgspec.structs.asdict(llm.get_default_sampling_params()) | dict(sampling)
    prompts = [line.prompt if line.prompt is not None else llm.render_chat(line.messages or []) for line in lines]
    params = [msgspec.convert({**common, **line.sampling}, SamplingParams, str_keys=True) for line in lines]
    return llm.generate(prompts, params, use_tqdm=show_progress) if prompts else []


def check_target(path: Path) -> None:
    """Raise InvalidRequestError if `path` cannot be written: better now than after a long batch. Creates the file."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error


def write_outputs(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """Write one RequestOutput a line. Raises InvalidRequestError if the file cannot be written."""
    write_target(path, b"".join(msgspec.json.encode(output) + b"\n" for output in outputs))


def write_target(path: Path, data: bytes) -> None:
    """Write a file. Raises InvalidRequestError if it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error


def _line(row: bytes, where: str) -> BatchLine:
    try:
        fields: dict[str, Any] = msgspec.json.decode(row, type=dict[str, Any])
        chosen: dict[str, Any] = {name: fields.pop(name) for name in ("prompt", "messages") if name in fields}
        line = msgspec.convert({**chosen, "sampling": fields}, BatchLine)
        check_sampling(fields)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}", param=error.param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    if (line.prompt is None) == (line.messages is None):
        raise InvalidRequestError(f"{where}: needs either prompt or messages")
    return line

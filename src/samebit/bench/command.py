"""What the commands of `samebit bench` do once their flags are read: run, show, store, and the exit status. Knows no flags' types.

Flags come by name, as they were given; each settings struct takes those that it has fields for. Loads no torch for a server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console

from samebit.bench.datasets import Workload
from samebit.bench.record import Record, read_record, write_record
from samebit.bench.serve import Secrets, ServeSettings, bench_server
from samebit.bench.show import print_record, run_bar
from samebit.bench.summary import parse_goals, parse_metrics, parse_number, parse_percentiles
from samebit.core.errors import ConfigError
from samebit.engine.batch_file import check_target

if TYPE_CHECKING:
    from samebit.core.config import EngineConfig

Flags = Mapping[str, Any]  # Any: what the command line parsed
_S = TypeVar("_S", bound=msgspec.Struct)
_INTERRUPTED = 130
_FILE_COLUMNS = 120


def offline(kind: str, config: EngineConfig, flags: Flags) -> int:
    """Measure an engine in this process. Raises SamebitError when it cannot run."""
    from samebit.bench.offline import OfflineSettings, bench_engine  # noqa: PLC0415 - loads torch

    told = _parsed(flags)
    settings, workload = _fields(OfflineSettings, told), _fields(Workload, told)
    _check_place(flags)
    with run_bar(is_wanted=not flags["disable_tqdm"]) as on_run:
        record = bench_engine(kind, config, settings, workload, on_run)
    return _finish(record, flags)


def server(flags: Flags) -> int:
    """Measure a server. Raises SamebitError when it does not answer a first request."""
    told = _parsed(flags) | {
        "base_url": flags["base_url"] or f"http://{flags['host']}:{flags['port']}",
        "request_rate": tuple(parse_number("request_rate", text, text) for text in flags["request_rate"].split(",")),
        "max_concurrency": _concurrencies(flags["max_concurrency"]),
        "burstiness": parse_number("burstiness", flags["burstiness"], flags["burstiness"]),
        "goodput": parse_goals([goal for text in flags["goodput"] or () for goal in text.split(",")]),
        "extra_body": _json_object(flags["extra_body"]),
    }
    settings, workload = _fields(ServeSettings, told), _fields(Workload, told)
    secrets = Secrets(flags["api_key"], _headers(flags["header"] or ()))
    _check_place(flags)
    with run_bar(is_wanted=not flags["disable_tqdm"]) as on_run:
        record = bench_server(settings, workload, secrets, on_run)
    return _finish(record, flags)


def plot(target: Path, paths: Sequence[Path], labels: Sequence[str]) -> None:
    """Draw records over one another. Raises SamebitError if that cannot be done."""
    from samebit.bench.plot import draw, names_of  # noqa: PLC0415 - only plots need it

    records = [read_record(path) for path in paths]
    names = list(labels) or names_of(records, paths)
    if len(names) != len(records):
        raise ConfigError(f"{len(names)} labels for {len(records)} records: give one for each, in their order")
    draw([msgspec.structs.replace(r, label=name) for r, name in zip(records, names, strict=True)], target)


def _finish(record: Record, flags: Flags) -> int:
    """Show it, store it where that is wanted, and tell how it went: 0, 1 where requests failed, 130 where it was broken off."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    print_record(record, console)
    path = _place(flags, record)
    if path is not None:
        write_record(path, record)
        Console(stderr=True).print(f"stored in {path}", markup=False, highlight=False)
    if not record.is_complete:
        return _INTERRUPTED
    return int(any(run.summary["failed"] for run in record.runs))


def _place(flags: Flags, record: Record) -> Path | None:
    """Where the record goes; None if nowhere."""
    folder, path = flags["result_dir"] or Path(), flags["output"]
    if path is not None:
        return Path(folder / path)
    if not flags["save_result"]:
        return None
    label = re.sub(r"[^\w.-]+", "-", record.label).strip("-.")
    when = re.sub(r"\D", "", record.environment["date"])
    return Path(folder / f"{record.kind}-{label}-{when}.json")


def _check_place(flags: Flags) -> None:
    """Raise InvalidRequestError if the record could not be stored: better now than after a long run."""
    folder = flags["result_dir"] or Path()
    if flags["output"] is not None:
        check_target(folder / flags["output"])
    elif flags["save_result"] and not folder.is_dir():
        raise ConfigError(f"result_dir={str(folder)!r}: is no folder")


def _parsed(flags: Flags) -> dict[str, Any]:  # Any: as Flags
    return {
        **flags,
        "percentile_metrics": parse_metrics(flags["percentile_metrics"]),
        "metric_percentiles": parse_percentiles(flags["metric_percentiles"]),
    }


def _fields(kind: type[_S], flags: Flags) -> _S:
    """A struct of the flags that are fields of it; its own defaults for the others."""
    return kind(**{name: flags[name] for name in kind.__struct_fields__ if name in flags})


def _concurrencies(text: str | None) -> tuple[int | None, ...]:
    if text is None:
        return (None,)
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise ConfigError(f"max_concurrency={text!r}: must be whole numbers of at least 1, as in 8 or 1,8,64")
    return tuple(map(int, text.split(",")))


def _headers(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not re.fullmatch(r"[\w-]+", name):
            raise ConfigError("header: must be NAME=VALUE")
        found[name] = value
    return found


def _json_object(text: str | None) -> dict[str, Any]:  # Any: JSON
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"extra_body={text!r}: must be a JSON object ({error})") from error

"""What an engine's memory holds, in numbers and as a table. Plain arithmetic; knows no device."""

from __future__ import annotations

from collections.abc import Mapping

from samebit.state.layout import PageGroup, StateGeometry

_LENGTHS = (1024, 4096, 16384, 65536)
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def memory_of(geometry: StateGeometry) -> dict[str, int]:
    """Bytes and ids of the pools by kind, and how many requests of some lengths fit at once (`fit_N`, N tokens each)."""
    layout = geometry.layout
    pages = {_name(group): count for group, count in zip(layout.groups, geometry.num_pages, strict=True)}
    lengths = [length for length in _LENGTHS if length < geometry.max_length] + [geometry.max_length]
    row_bytes = sum(stream.width for stream in layout.streams) * layout.element_bytes
    return {
        "state_bytes": geometry.num_bytes,
        "checkpoints": geometry.num_snapshots,
        "slots": geometry.num_slots,
        "page_size": geometry.page_size,
        "row_bytes": geometry.num_rows * row_bytes,
        **{f"pages_{name}": count for name, count in pages.items()},
        **{
            f"page_bytes_{_name(group)}": count * geometry.page_size * group.width * layout.element_bytes
            for group, count in zip(layout.groups, geometry.num_pages, strict=True)
        },
        **{f"fit_{length}": num_that_fit(geometry, length) for length in lengths},
    }


def num_that_fit(geometry: StateGeometry, length: int) -> int:
    """Requests of `length` tokens that can run at once, if nothing is cached."""
    found = [geometry.num_slots]
    for group, count in zip(geometry.layout.groups, geometry.num_pages, strict=True):
        seen = length if group.window is None else min(length, group.window + geometry.page_size)
        found.append(count // -(-seen // geometry.page_size))
    return min(found)


def memory_table(memory: Mapping[str, int]) -> str:
    """The figures of `EngineInfo.memory`, a line each."""
    lines = ["memory:"]
    for name, value in memory.items():
        if name.startswith("fit_"):
            lines.append(f"  requests of {name.removeprefix('fit_')} tokens at once: {value}")
        else:
            shown = in_units(value) if "bytes" in name.split("_") else str(value)
            lines.append(f"  {name.replace('_', ' ')}: {shown}")
    return "\n".join(lines)


def in_units(num_bytes: int) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def _name(group: PageGroup) -> str:
    return str(group.window or "full")

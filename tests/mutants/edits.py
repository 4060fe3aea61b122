"""Faults as small edits: a function's text with one piece replaced, put in its place while a test runs."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A fault, in one sentence; the public issues that it imitates (none: a kind, not an instance); and how it shows.

    `check` is the check of the battery that must find it, `shows` a piece of what that says.
    """

    name: str
    fault: str
    imitates: tuple[str, ...]
    patches: tuple[Patch, ...]
    check: str
    shows: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in self.patches:
            patch(monkeypatch)


def edit(target: str, *pieces: str) -> Patch:
    """Replace pieces of the text of `target` ("module:function" or "module:Class.method", below samebit): old, new, ...

    Each old piece must be there, and only once.
    """

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        module, owner, name, function = _find(target)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in zip(pieces[::2], pieces[1::2], strict=True):
            assert source.count(old) == 1, (
                f"{source.count(old)} of {old!r} in {target}: the fault does not fit the code"
            )
            source = source.replace(old, new)
        code = compile(source, f"<mutant of {target}>", "exec")  # annotations stay text, as in this file
        made: dict = {}
        exec(code, vars(module), made)
        _put(monkeypatch, owner, name, made[name])

    return patch


def wrap(target: str, wrapper: Callable) -> Patch:
    """Call `wrapper(original, *args)` instead of `target`."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        _, owner, name, function = _find(target)

        def wrapped(*args, **options):
            return wrapper(function, *args, **options)

        _put(monkeypatch, owner, name, wrapped)

    return patch


def define(module: str, name: str, value: object) -> Patch:
    """Give a module one more name, for an edit's text."""
    return lambda monkeypatch: monkeypatch.setattr(f"samebit.{module}.{name}", value, raising=False)


def _find(target: str):
    module_name, _, path = target.partition(":")
    module = importlib.import_module(f"samebit.{module_name}")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, module)
    found = inspect.getattr_static(owner, name)
    return module, owner, name, found.fget if isinstance(found, property) else found


def _put(monkeypatch: pytest.MonkeyPatch, owner, name: str, new) -> None:
    old = inspect.getattr_static(owner, name)
    monkeypatch.setattr(owner, name, new)
    if inspect.isclass(owner):
        return
    for module in [m for n, m in sys.modules.items() if n.startswith("samebit.")]:
        if vars(module).get(name) is old:  # imported by name
            monkeypatch.setattr(module, name, new)

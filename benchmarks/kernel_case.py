"""What benchmarks of kernels ask of a kernel at a size. Knows no kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Case(ABC):
    """A kernel at a size. One kernel computes the result, and no setting changes its bits, unless a case says otherwise."""

    __slots__ = ()
    modules: tuple[ModuleType, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the kernel, and of what it is for."""

    @property
    @abstractmethod
    def size(self) -> str:
        """In rows or tokens."""

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """What is timed by itself, and the kernels that belong to it (none: all)."""
        return {"": ()}

    @abstractmethod
    def chosen(self) -> Any:
        """The setting that the kernel's table gives now."""

    @abstractmethod
    def settings(self) -> list[Any]:
        """Others worth a try."""

    @abstractmethod
    def variant(self, setting: Any) -> Hashable:
        """Equal for what is compiled alike."""

    def order(self, setting: Any) -> Hashable:
        """Equal for settings that must give the same bits."""
        return ()

    @abstractmethod
    def label(self, setting: Any) -> str:
        """A word for the setting."""

    @abstractmethod
    def work(self, part: str) -> tuple[float, float]:
        """Bytes that a part must move at least, and its operations."""

    @abstractmethod
    def footprint(self) -> int:
        """Bytes of the operands."""

    @abstractmethod
    def operands(self, device: torch.device) -> Any:
        """Random ones."""

    @abstractmethod
    def run(self, operands: Any, setting: Any) -> Tensor:
        """Launch all that computes the result."""

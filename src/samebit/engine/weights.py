"""Other weights in the place of those that are served: in the same memory, which recorded steps go on reading. Knows no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from samebit.core.errors import ModelError
from samebit.kernels.sets import KernelSet


@dataclass(frozen=True, slots=True)
class Exchange:
    """What makes one model of another that is built alike: the values of its tensors, and factors and settings that are none."""

    tensors: list[tuple[Tensor, Tensor]]
    attributes: list[tuple[object, str, object]]

    @classmethod
    def between(cls, served: object, other: object) -> Exchange:
        """What `served` lacks to be `other`, which may be on another device. Raises ModelError where they are not built alike."""
        exchange = cls([], [])
        exchange._compare(served, other, "", set())
        return exchange

    @torch.inference_mode()
    def make(self) -> bool:
        """Change the served model; whether steps that were recorded with it are still right. A plain value is frozen into them."""
        for to, source in self.tensors:
            to.copy_(source)
        for owner, name, value in self.attributes:
            object.__setattr__(owner, name, value)
        return not self.attributes

    def _compare(self, served: object, other: object, place: str, seen: set[int]) -> None:
        if id(served) in seen:
            return
        seen.add(id(served))
        for owner, name, old, new in _parts(served, other):
            where = f"{place}.{name}".removeprefix(".")
            is_number = isinstance(old, int | str) or (
                isinstance(old, float) and isinstance(served, list | tuple | dict)
            )
            if type(old) is not type(new) or (is_number and old != new):
                raise ModelError(f"{where} is {new!r:.99}; the model that is served has {old!r:.99}")
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                if (old.shape, old.dtype) != (new.shape, new.dtype):
                    wanted = f"{tuple(old.shape)} of {old.dtype}"
                    raise ModelError(
                        f"{where} is {tuple(new.shape)} of {new.dtype}; the model that is served has {wanted}"
                    )
                self.tensors.append((old, new))
            elif _is_whole(old):
                self._compare(old, new, where, seen)
            elif isinstance(old, float | msgspec.Struct) and old != new:
                self.attributes.append((owner, name, new))


def _is_whole(value: object) -> bool:
    """Whether something is made of parts of which some may be weights."""
    is_own = type(value).__module__.startswith("samebit.")
    return isinstance(value, list | tuple | dict) or (is_own and not isinstance(value, KernelSet | msgspec.Struct))


def _parts(served: object, other: object) -> Iterator[tuple[object, str, object, object]]:
    """What two things of a type are made of, pair by pair: the owner, the name, the one and the other."""
    olds, news = _named(served), _named(other)
    if olds.keys() != news.keys():
        raise ModelError(f"a {type(served).__name__} is built otherwise than in the model that is served")
    for name, old in olds.items():
        yield served, name, old, news[name]


def _named(whole: object) -> dict[str, object]:
    if isinstance(whole, dict):
        return {str(key): value for key, value in whole.items()}
    if isinstance(whole, list | tuple):
        return {str(place): value for place, value in enumerate(whole)}
    slots = [name for kind in type(whole).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(whole, name) for name in slots if hasattr(whole, name)} | getattr(whole, "__dict__", {})

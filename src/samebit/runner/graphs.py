"""Graphs: a step's operations, recorded once for a bucket and replayed on the same buffers. Knows no plan.

`trace` records through torch's dispatcher on any device, so that the faults of capture (a Python branch that was taken or
not, a launch that leaves no trace, a buffer that moved) happen, and are caught, where there is no GPU. Recording runs on
inert inputs, which change no pool outside the sinks. What was recorded must then equal what the first real step launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from samebit.core.errors import GraphError
from samebit.kernels.modes import DispatchMode

# Reads of a value by the host, and results whose shape depends on values: a recording would freeze what they gave once.
FROZEN = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::nonzero_static",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
}

# Torch makes an alias of a result that somebody else holds, as a recorder does; it launches nothing.
_ALIAS = "aten::detach"

Manifest = Counter[str]


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for the n-th tensor that the recorded operations make."""

    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation: flattened arguments (tensors it did not make are kept as they are) and the numbers it makes."""

    function: Callable[..., Any]
    leaves: list[Any]  # Any: whatever an operator takes
    spec: Any  # Any: torch's private description of the arguments' nesting
    made: list[int | None]


class _Watch(DispatchMode):
    """Counts operations and refuses those that a recording would freeze; as a base, lets them run."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest: Manifest = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's protocol
        name = func.name()
        if name in FROZEN or _is_boolean_index(name, args):
            raise GraphError(f"a step must not use {name}: its result would be frozen into the recording")
        self.manifest[name] += name != _ALIAS
        return func(*args, **(kwargs or {}))


class _Recorder(_Watch):
    """Keeps every operation with its arguments, and every tensor it makes alive until the recording is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's protocol
        leaves, spec = tree_flatten((args, kwargs or {}))
        named = [self.name(leaf) for leaf in leaves]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = tree_flatten(result)[0]
        self.calls.append(_Call(func, named, spec, [self._number(item) for item in results]))
        return result

    def name(self, leaf: Any) -> Any:  # Any: whatever an operator takes
        """`leaf`, or what stands for it if a recorded operation made it."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.made:
            return _Made(self.made[id(leaf)])
        self.outside[id(leaf)] = leaf
        return leaf

    def _number(self, result: Any) -> int | None:  # Any: whatever an operator gives
        if not isinstance(result, Tensor) or id(result) in self.outside:
            return None
        if id(result) not in self.made:
            self.made[id(result)] = len(self.alive)
            self.alive.append(result)
        return self.made[id(result)]


class Recording:
    """A recorded step. `replay` runs its operations again, on the very tensors that it was recorded on."""

    def __init__(self, step: Callable[[], Tensor], count_launches: Callable[[], int]) -> None:
        """Record `step`, whose inputs must be inert; `count_launches` counts native kernels below the dispatcher."""
        recorder = _Recorder()
        before = count_launches()
        with recorder:
            result = step()
        launched = count_launches() - before
        self.manifest = recorder.manifest
        self._calls = recorder.calls
        self._num_made = len(recorder.alive)
        self._result = recorder.name(result)
        self._outside = [(tensor, tensor.data_ptr()) for tensor in recorder.outside.values()]
        before = count_launches()
        self.replay()
        replayed = count_launches() - before
        if replayed != launched:
            raise GraphError(
                f"a step launches {launched} native kernels and its recording {replayed}: some left no trace"
            )

    def replay(self) -> Tensor:
        """Run the recorded operations; the step's result. Raises GraphError if a buffer has moved."""
        for tensor, address in self._outside:
            if tensor.data_ptr() != address:
                raise GraphError(f"a tensor of shape {tuple(tensor.shape)} has moved since it was recorded")
        made: list[Any] = [None] * self._num_made  # Any: tensors, each set before it is used
        for call in self._calls:
            leaves = [made[leaf.number] if isinstance(leaf, _Made) else leaf for leaf in call.leaves]
            args, kwargs = tree_unflatten(leaves, call.spec)
            results = tree_flatten(call.function(*args, **kwargs))[0]
            for number, result in zip(call.made, results, strict=True):
                if number is not None:
                    made[number] = result
        packed: Tensor = made[self._result.number] if isinstance(self._result, _Made) else self._result
        return packed

    def check(self, manifest: Manifest) -> None:
        """Raise GraphError, naming the operations, unless an eager step did just what was recorded."""
        check_manifest(manifest, self.manifest)


def check_manifest(manifest: Manifest, recorded: Manifest) -> None:
    """Raise GraphError, naming the operations, unless a step did just what was recorded."""
    extra, missing = manifest - recorded, recorded - manifest
    if extra or missing:
        raise GraphError(
            f"a step and its recording differ: not recorded {dict(extra)}, only recorded {dict(missing)}; "
            "a branch was taken at one time and not at the other"
        )


def watched(step: Callable[[], Tensor]) -> tuple[Tensor, Manifest]:
    """Run a step and count its operations."""
    watch = _Watch()
    with watch:
        result = step()
    return result, watch.manifest


def _is_boolean_index(name: str, args: Any) -> bool:  # Any: an operator's arguments
    if not name.startswith(("aten::index.", "aten::index_put")):
        return False
    return any(isinstance(i, Tensor) and i.dtype is torch.bool for i in tree_flatten(args[1])[0])

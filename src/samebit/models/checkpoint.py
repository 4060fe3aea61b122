"""A folder of safetensors files, read one tensor at a time. Knows no architecture.

Every fault is a CheckpointError that names the file or the tensor.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samebit.core.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("BF16", "F16", "F32")

Shape = tuple[int, ...]

_HOST = torch.device("cpu")


def read_json(path: Path) -> dict[str, Any]:  # Any: a JSON object
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


class Checkpoint:
    """The tensors of a model folder: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    A context manager: the files are mapped while it is open. Tensors that were taken are copies and outlive it.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}  # Any: safetensors' file handle has no public type
        try:
            if (folder / SINGLE_FILE).is_file():
                self._file_of = self._open(folder / SINGLE_FILE)
            elif (folder / INDEX_FILE).is_file():
                self._open_shards(folder)
            else:
                raise CheckpointError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def check(self, name: str, shapes: tuple[Shape, ...]) -> None:
        """Raise CheckpointError unless `name` exists with one of `shapes` and a floating dtype; reads no data."""
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name!r} is missing")
        stored = self._file_of[name].get_slice(name)
        shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
        if dtype not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
        if shape not in shapes:
            expected = " or ".join(str(list(s)) for s in shapes)
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}, expected {expected}")

    def take(self, name: str, device: torch.device = _HOST) -> Tensor:
        """A copy of a checked tensor on `device`, fp32 or bf16 as stored; fp16 becomes fp32, which is exact.

        Raises CheckpointError if a value of it is not finite.
        """
        stored: Tensor = self._file_of[name].get_tensor(name)
        # A copy, because a file that is replaced while we serve must not change the weights. All that is done to it is done there.
        tensor = stored.to(device, copy=True)
        if tensor.dtype == torch.float16:
            tensor = tensor.float()
        # A sum is not finite if a value is not, and many times faster; it can also overflow.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise CheckpointError(f"tensor {name!r} has values that are not finite (NaN or infinity)")
        return tensor

    def _open(self, path: Path) -> dict[str, Any]:
        try:
            handle = self._files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is not a complete safetensors file ({error})") from error
        return dict.fromkeys(handle.keys(), handle)

    def _open_shards(self, folder: Path) -> None:
        listed = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must map tensor names to file names")
        for file in sorted(set(listed.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX_FILE}: {file!r} is not a plain file name")
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder / file}: listed in {INDEX_FILE} but missing")
            held = self._open(folder / file)
            wanted = {name for name, where in listed.items() if where == file}
            for name in sorted(wanted - held.keys()):
                raise CheckpointError(f"{INDEX_FILE} puts tensor {name!r} in {file}, which lacks it")
            for name in sorted(held.keys() - wanted):
                raise CheckpointError(f"{file} holds tensor {name!r}, which {INDEX_FILE} does not put there")
            self._file_of |= held

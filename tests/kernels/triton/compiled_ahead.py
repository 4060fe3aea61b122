"""Compiles two kernels for a Hopper device that is not there, and writes what came of it. Triton must not be interpreting."""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from samebit.kernels.triton import launch, rows


class Launcher:
    """Stands for the code that launches a kernel; there is nothing to launch on."""

    def __init__(self, *_):
        """Of a kernel's source and metadata."""

    def __call__(self, *_):
        raise RuntimeError("launched")


class Absent(DriverBase):
    """A driver that knows what to compile for; whatever is launched fails."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232448}
    )

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        assert device == 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    made = []

    def run() -> None:
        x = torch.ones(3, 256)
        norm = rows.implementations(torch.float32)["rms_norm"]
        made.extend(norm(x, torch.ones(columns), 1e-6, 1) for columns in (256, 128, 256))

    before = launch.num_launches()
    launch.compile_for(run)
    kernels = rows.norm_kernel.device_caches[0][0]
    json.dump(
        {
            "shapes": [list(out.shape) for out in made],
            "launches": launch.num_launches() - before,
            "compiled": [type(kernel).__name__ for kernel in kernels.values()],
            "loaded": [kernel.module is not None for kernel in kernels.values()],
            "values": [out.abs().max().item() for out in made],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()

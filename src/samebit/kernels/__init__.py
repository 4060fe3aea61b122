"""Row-pure kernels: tensors in, tensors out. Imports no other part of samebit."""

from samebit.kernels.certify import Failure, certify
from samebit.kernels.sets import KernelKind, KernelSet, select_kernels, torch_kernels
from samebit.kernels.values import (
    SINK_PAGE,
    SINK_ROW,
    ZERO_ROW,
    AttnIndex,
    ConvIndex,
    KvIndex,
    Packed,
    PackedExperts,
    SampleColumns,
)

__all__ = [
    "SINK_PAGE",
    "SINK_ROW",
    "ZERO_ROW",
    "AttnIndex",
    "ConvIndex",
    "Failure",
    "KernelKind",
    "KernelSet",
    "KvIndex",
    "Packed",
    "PackedExperts",
    "SampleColumns",
    "certify",
    "select_kernels",
    "torch_kernels",
]

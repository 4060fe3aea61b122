"""Choosing, building and recording kernel sets, and the thread pool under them."""

import inspect
import logging
import multiprocessing
import threading
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.kernels import selection, torch_set
from samebit.kernels.composed import composed
from samebit.kernels.native import bindings, build
from samebit.kernels.native.build import host_isas
from samebit.kernels.ops import SCHEMAS
from tests.kernels.cases import normal, ring_index


def test_a_set_says_what_its_bits_depend_on(native, twin):
    assert twin.describe() == {"kernels": "torch"}
    described = native.describe()
    assert described["kernels"] == native.name
    assert described["compiler"]
    assert len(described["build"]) == 16


def test_auto_takes_the_best_instruction_set(kernel_kind):
    kernels = selection.select_kernels(kernel_kind, 1)
    assert kernels.name == "torch" if kernel_kind == "torch" else kernels.name.startswith("native-")
    assert kernels.num_threads == 1


@pytest.mark.parametrize(("kind", "threads", "message"), [("gpu", 1, "'gpu'"), ("auto", 0, "got 0")])
def test_a_choice_that_makes_no_sense_is_refused(kind, threads, message):
    with pytest.raises(ValueError, match=message):
        selection.select_kernels(kind, threads)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A host whose compilers are gone and whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.setattr(selection, "load_library", build.load_library.__wrapped__)


def test_without_a_compiler_auto_warns_once_and_falls_back(no_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        assert selection.select_kernels("auto", 2).name == "torch"
    (record,) = caplog.records
    assert "no C compiler found" in record.getMessage()


def test_without_a_compiler_native_is_refused_with_the_reason(no_compiler):
    with pytest.raises(build.NativeUnavailableError, match="no C compiler found"):
        selection.select_kernels("native", 2)


def test_a_failed_compilation_leaves_no_library_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(build.ISA_FLAGS, "portable", ("-not-a-flag",))
    with pytest.raises(build.NativeUnavailableError, match="not-a-flag"):
        build.load_library.__wrapped__("portable")
    assert not list(tmp_path.rglob("*.so"))


def test_engines_that_start_at_once_build_one_usable_library(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = []
    starts = [
        threading.Thread(target=lambda: loaded.append(build.load_library.__wrapped__("portable"))) for _ in range(2)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert [library.functions.panel_columns() for library in loaded] == [8, 8]
    assert len(list(tmp_path.rglob("*"))) == len({"samebit", "native", "key", "kernels.so"})


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_recorder_sees_one_operator_with_its_mutations(kernels):
    x, taps = normal(1, 4, 6), normal(2, 4, 6)
    ix = ring_index(torch.arange(2, 12), 0, 4, 4)
    rows, tags = torch.zeros(12, 6), torch.zeros(12, dtype=torch.int64)
    with Recorder() as recorder:
        kernels.short_conv(x, taps, rows, tags, ix, None)
    (operator,) = recorder.seen
    assert operator.namespace == "samebit"
    changed = [a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert changed == ["rows", "row_tags"]


def operator(kernels, name):
    return getattr(torch.ops.samebit, f"{name}_{kernels.name.removeprefix('native-')}").default


def test_every_kernel_is_an_operator_of_every_set(kernels):
    for name, schema in SCHEMAS.items():
        assert str(operator(kernels, name)._schema).endswith(schema.split(" -> ")[1])


def test_shapes_are_known_without_data(kernels):
    x = torch.empty(3, 5, device="meta")
    product = operator(kernels, "linear")(x, torch.empty(0, device="meta"), 7, False, False, 1)
    assert product.shape == (3, 7)
    addends = operator(kernels, "addends")(x, torch.empty(0, device="meta"), 7, False, 1)
    assert (addends.shape, addends.dtype) == ((1, 3, 7), torch.float32)
    total, gated = operator(kernels, "normed_linear")(
        x, x, x[0], 1e-6, torch.empty(0, device="meta"), 8, False, True, 1
    )
    assert (total.shape, gated.shape) == ((3, 5), (3, 4))
    ids, weights = operator(kernels, "route")(x, torch.empty(4, device="meta"), 2, 1, 1.0, 1)
    assert (ids.shape, ids.dtype, weights.shape) == ((3, 3), torch.int32, (3, 3))


def test_callers_on_several_threads_do_not_disturb_each_other(native):
    packed, x = native.pack_linear(normal(1, 1500, 300)), normal(2, 90, 300)
    wanted = replace(native, num_threads=1).linear(x, packed)
    wrong = []

    def call():
        same = [torch.equal(native.linear(x, packed), wanted) for _ in range(30)]
        wrong.append(same.count(False))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [0] * 4


def _forked(connection, native, x, packed):
    connection.send(native.linear(x, packed).numpy().tobytes())


# Fewer outputs than torch hands to its own threads, which do not survive a fork.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_compute_with_threads(native):
    packed, x = native.pack_linear(normal(1, 1500, 300)), normal(2, 20, 300)
    wanted = native.linear(x, packed).numpy().tobytes()
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_forked, args=(there, native, x, packed))
    child.start()
    try:
        assert here.poll(30)
        assert here.recv() == wanted
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("which", ["torch", *host_isas()])
def test_implementations_take_the_arguments_of_their_schemas(which):
    if which == "torch":
        implementations = torch_set.IMPLEMENTATIONS
    else:
        implementations = bindings.implementations(build.load_library(which))
    implementations = composed(implementations) | implementations
    for name, schema in SCHEMAS.items():
        declared = [argument.name for argument in torch._C.parse_schema(name + schema).arguments]
        assert list(inspect.signature(implementations[name]).parameters) == declared, name

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest

from samebit.kernels import triton as package

# What may be computed before the kernels before have ended: places, and requests for weights.
HARMLESS = {"program_id", "num_programs", "cdiv", "minimum", "arange", "to", "prefetch"}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for module in pkgutil.iter_modules(package.__path__):
        source = inspect.getsource(import_module(f"{package.__name__}.{module.name}"))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield f"{module.name}.{node.name}", node


def called(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            yield part.func.attr if isinstance(part.func, ast.Attribute) else ast.unparse(part.func)


@pytest.mark.parametrize(("name", "kernel"), [pytest.param(*pair, id=pair[0]) for pair in kernels()])
def test_a_kernel_touches_nothing_that_kernels_write_before_those_before_it_have_ended(
    name: str, kernel: ast.FunctionDef
):
    before = []
    for statement in kernel.body:
        if ast.unparse(statement) == "begin()":
            break
        before += called(statement)
    else:
        pytest.fail(f"{name} never calls begin()")

    assert set(before) <= HARMLESS

"""What importing samebit brings along, each tried in a fresh interpreter."""

import importlib
import subprocess
import sys

import pytest

import samebit


def modules_after(code):
    """Names of the modules that are loaded once `code` has run."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import samebit",
        "import samebit.core.plan",
        "from samebit import SamplingParams, EngineConfig, RequestOutput, errors",
        "import samebit.engine.tokenizer, samebit.engine.detokenizer",
        "import samebit.engine.chat_template, samebit.engine.model_source",
    ],
)
def test_the_host_side_loads_without_torch(code):
    assert modules_after(code).isdisjoint({"torch", "transformers", "numpy"})


def test_the_offline_api_loads_without_a_server():
    loaded = modules_after("from samebit import LLM")
    assert "samebit.engine.llm" in loaded
    assert loaded.isdisjoint({"fastapi", "uvicorn", "zmq", "starlette", "transformers"})


def test_a_recorded_step_loads_no_compiler_of_torch():
    # Loading it takes longer than starting a small model.
    loaded = modules_after("from samebit import LLM\nLLM('nano', graph='trace', capture='use').generate(['a'])")
    assert "samebit.runner.graphs" in loaded
    assert "torch._dynamo" not in loaded


def test_the_public_names_are_what_can_be_imported():
    assert len(samebit.__all__) == len(set(samebit.__all__))
    for name in samebit.__all__:
        assert getattr(samebit, name) is not None
    assert set(samebit.__all__) <= set(dir(samebit))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = samebit.LMM


def test_every_error_has_one_base():
    errors = importlib.import_module("samebit.core.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) > 5
    assert all(issubclass(cls, errors.SamebitError) for cls in classes)

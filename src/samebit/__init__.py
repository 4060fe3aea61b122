"""The public names of samebit, loaded when first used.

Knows where each name lives and nothing else. Loading is lazy so that `import samebit.core.plan`
and `samebit --help` pay for neither torch nor a server.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.core import errors
    from samebit.core.config import EngineConfig
    from samebit.core.request import RequestOutput, SamplingParams
    from samebit.core.structured import StructuredOutputsParams
    from samebit.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "errors"]

_MODULE_OF = {
    "LLM": "samebit.engine.llm",
    "EngineConfig": "samebit.core.config",
    "RequestOutput": "samebit.core.request",
    "SamplingParams": "samebit.core.request",
    "StructuredOutputsParams": "samebit.core.structured",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("samebit.core.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'samebit' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Tools in the bodies that clients send: what may be called, what must be, and calls of earlier turns. Knows types only."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, field_validator
from pydantic_core import PydanticCustomError

from samebit.server.body import Body, Whole, described

# The code of the error whose place is the field `type` of what it is told of.
UNKNOWN_TYPE = "unknown_type"
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Body):
    """A function; `parameters` is the JSON schema of its arguments, an object. `strict`: calls are held to it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema, of which the model reads what it likes
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:  # Any: as above
        if schema is None:
            return None
        required, properties = schema.get("required", []), schema.get("properties", {})
        if schema.get("type", "object") != "object":
            raise PydanticCustomError("schema", "must be the schema of an object: type is not 'object'")
        if not isinstance(properties, dict) or not all(isinstance(item, dict | bool) for item in properties.values()):
            raise PydanticCustomError("schema", "not a JSON schema: properties must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(item, str) for item in required):
            raise PydanticCustomError("schema", "not a JSON schema: required must be a list of names")
        return schema


def _check_type(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Name a kind of tool that there is not before anything that it lacks."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            UNKNOWN_TYPE, "{kind} is not supported; only 'function' is", {"kind": repr(kind[:64])}
        )
    return handler(value)


KnownType = WrapValidator(_check_type)


class Tool(Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    described("'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"),
]


class SentFunction(Body):
    """What an earlier turn called; `arguments` is JSON, as text or as it is."""

    name: str
    arguments: Annotated[
        str | dict[str, Any], described("a string or an object")
    ]  # Any: JSON that only the template reads
    parsed_arguments: Any = None  # Any: what a client made of them


class SentToolCall(Body):
    """A call in an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: SentFunction
    index: Whole | None = None


def check_names(names: Sequence[str]) -> None:
    """Raise for a name that two tools have."""
    for place, name in enumerate(names):
        if name in names[:place]:
            text = "tools.{place} has the name {name} of an earlier one"
            raise PydanticCustomError("duplicate", text, {"place": place, "name": repr(name)})

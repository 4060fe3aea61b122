"""What a body says an answer must be, as the engine takes it. Knows bodies; whether a grammar can be followed, the engine knows."""

from typing import Any

from samebit.core.errors import InvalidRequestError
from samebit.core.structured import StructuredOutputsParams, ToolShape
from samebit.server.request_models import ChatBody, CompletionBody
from samebit.server.structured_models import ObjectFormat, SchemaFormat
from samebit.server.tool_choice import is_one_call
from samebit.server.tool_models import NamedTool

Wishes = dict[str, Any]  # Any: values of StructuredOutputsParams' fields


def structured_outputs(
    body: ChatBody | CompletionBody, format_field: str = "response_format"
) -> StructuredOutputsParams | None:
    """What the answer's text and calls must be; None if they may be anything. `format_field`: what the client calls that field.

    Raises InvalidRequestError for two wishes that cannot both be fulfilled.
    """
    said = {field: wishes for field, wishes in _wishes(body, format_field).items() if wishes is not None}
    if len(said) > 1:
        raise InvalidRequestError(f"{' and '.join(said)} cannot be had together; send one", param=list(said)[-1])
    text: Wishes = next(iter(said.values()), {})
    field = next(iter(said), "tools")
    calls = _calls(body, has_text=bool(said)) if isinstance(body, ChatBody) and body.tools else {}
    if calls.get("must_call") and said:
        raise InvalidRequestError(f"{field}: not where tool_choice asks for a call", param=field)
    if not said and not calls:
        return None
    return StructuredOutputsParams(field=field, **text, **calls)


def _wishes(body: ChatBody | CompletionBody, format_field: str) -> dict[str, Wishes | None]:
    """What the text must be by the field that says so, and None for fields that do not."""
    named, format_ = body.structured_outputs, body.response_format
    structured = None if named is None else named.model_dump(by_alias=True, exclude_none=True)
    formatted: Wishes | None = None
    if isinstance(format_, ObjectFormat):
        formatted = {"json_object": True}
    elif isinstance(format_, SchemaFormat):
        formatted = {"json": format_.json_schema.schema_}
    return {
        format_field: formatted,
        "structured_outputs": structured,
        "regex": None if body.regex is None else {"regex": body.regex},
        "ebnf": None if body.ebnf is None else {"grammar": body.ebnf},
    }


def _calls(body: ChatBody, *, has_text: bool) -> Wishes:
    """The form that calls are held to: that of strict tools, and of all where a call is asked for."""
    choice = body.tool_choice
    must_call = choice == "required" or isinstance(choice, NamedTool)
    functions = [tool.function for tool in body.tools or ()]
    if choice == "none" or not (must_call or has_text or any(function.strict for function in functions)):
        return {}
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    shapes = [
        ToolShape(name=function.name, parameters=function.parameters or {} if must_call or function.strict else {})
        for function in functions
    ]
    return {"tools": shapes, "must_call": must_call, "may_call_again": not is_one_call(body)}

"""What every body that a client may send is: strict about types, and about fields that are not known or not supported."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

# Whole numbers travel to the engine in 64 bits.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]

# The only values that are accepted of fields whose work is not done here: those that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "background": (None, False),
    "conversation": (None,),
    "function_call": (None,),
    "functions": (None, []),
    "generate_summary": (None,),
    "lora_path": (None, ""),
    "max_tool_calls": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "previous_response_id": (None,),
    "refusal": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "summary": (None, []),
    "truncation": (None, "disabled"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


def described(text: str, *, names_items: bool = False) -> WrapValidator:
    """One sentence instead of an error for each member of a union.

    `names_items`: what is wrong with an item of a list is told at its place, unless it is no kind of item that there is.
    """

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            fault = _within(error) if names_items else None
            if fault is not None:
                raise ValidationError.from_exception_data(error.title, [fault]) from None
            raise PydanticCustomError("shape", "must be {text}", {"text": text}) from None

    return WrapValidator(validate)


def _within(error: ValidationError) -> InitErrorDetails | None:
    """The first fault in an item of a list, at its place in the list, if the item is of a kind that there is."""
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        place: Sequence[int | str] = fault["loc"]
        while place and not isinstance(place[0], int):
            place = place[1:]  # which member of the union it is
        if place:
            kind = PydanticCustomError(fault["type"], "{text}", {"text": fault["msg"]})
            is_other_kind = (place[-1], fault["type"]) == ("type", "literal_error")
            return None if is_other_kind else InitErrorDetails(type=kind, loc=tuple(place), input=None)
    return None


def _refuse(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "unknown field")
    return handler(value)


class Body(BaseModel):
    """Strict: no field that nobody knows, unless it is null, no number in quotes, no NaN."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    # What clients add to an answer that they send back has a value only where they know of one.
    __pydantic_extra__: dict[str, Annotated[None, WrapValidator(_refuse)]] = Field(init=False)

    @field_validator(*NEUTRAL, check_fields=False)
    @classmethod
    def _is_neutral(cls, value: object, info: ValidationInfo) -> object:
        accepted = NEUTRAL[str(info.field_name)]
        # True == 1 in Python, but not in JSON.
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted):
            choices = " or ".join(repr(item) for item in accepted if item is not None)
            hint = f"leave it out or send {choices}" if choices else "leave it out"
            raise PydanticCustomError("unsupported", "not supported; {hint}", {"hint": hint})
        return value

"""What every body that a client may send is: strict about types, and about fields that are not known or not supported."""

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
from pydantic_core import PydanticCustomError

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


def described(text: str) -> WrapValidator:
    """One sentence instead of an error for each member of a union."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", "must be {text}", {"text": text}) from None

    return WrapValidator(validate)


class Body(BaseModel):
    """Strict: no field that nobody knows, no number in quotes, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

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

"""What the text of an answer must be, in the bodies that clients send: OpenAI's field, vLLM's, and sglang's. Knows types only."""

from typing import Annotated, Any, Literal

from pydantic import Field

from samebit.server.body import Body


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema. Answers are held to it whatever `strict` says; `name` and `description` are the client's own."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")  # Any: a JSON schema
    strict: bool | None = None


class SchemaFormat(Body):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    """The same in the responses endpoint's form."""

    type: Literal["json_schema"]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """One of: a JSON schema or its text, any JSON object, a regular expression, a list of texts, a grammar."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")  # Any: a JSON schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def in_chat_form(wanted: FlatFormat | None) -> ResponseFormat | None:
    """A format of the responses endpoint as one of a chat."""
    if not isinstance(wanted, FlatSchemaFormat):
        return wanted
    return SchemaFormat.model_construct(type="json_schema", json_schema=wanted)

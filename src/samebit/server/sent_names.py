"""What a client called the field that something is wrong with: the engine's words as each body spells them. Knows bodies as fields only."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Self

from pydantic import BaseModel

from samebit.core.errors import InvalidRequestError
from samebit.core.request import EngineOutput

# The engine's word, and what it comes from: the first of these that was sent is named. A field that was not sent is not at fault:
# a limit that is exceeded without it is exceeded by what was sent.
_CONVERSATION = ("messages", "input")
_SENT_AS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", *_CONVERSATION),
    "messages": _CONVERSATION,
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "prompt", *_CONVERSATION),
    "n": ("n", "prompt", *_CONVERSATION),
    "reasoning_effort": ("reasoning_effort", "reasoning.effort", "chat_template_kwargs.reasoning_effort"),
    "logprobs": ("logprobs", "include"),
}


@contextmanager
def in_words_of(body: BaseModel) -> Iterator[None]:
    """Whatever is wrong with the request is told in the words of `body`, from which it was made."""
    try:
        yield
    except InvalidRequestError as error:
        raise _renamed(error, body) from error


class SentOutputs:
    """The outputs of a request, whose error, if there is one, is told in the words of `body`."""

    def __init__(self, body: BaseModel, outputs: AsyncIterator[EngineOutput]) -> None:
        self._body, self._outputs = body, outputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        try:
            return await anext(self._outputs)
        except InvalidRequestError as error:
            raise _renamed(error, self._body) from error


def _renamed(error: InvalidRequestError, body: BaseModel) -> InvalidRequestError:
    name, text = _sent_name(body, error.param), str(error)
    if name is not None and name != error.param:
        text = re.sub(rf"\b{re.escape(error.param or '')}(?=[=:])", name, text)
    return type(error)(text, param=name)


def _sent_name(body: BaseModel, param: str | None) -> str | None:
    word = (param or "").partition(".")[0]
    for name in _SENT_AS.get(word, ()):
        if _is_sent(body, name):
            return param if name == word else name
    # It may also be a field that is needed.
    return param if word in type(body).model_fields else None


def _is_sent(body: BaseModel, path: str) -> bool:
    value: object = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value is not None

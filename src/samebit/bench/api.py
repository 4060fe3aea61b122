"""OpenAI's completions and chat as a load generator needs them: bodies of requests, and what an event of a stream tells.

Knows JSON. Knows neither connections nor times.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from samebit.bench.http import FailedError, HttpClient

# vLLM's names, and where each asks.
BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
_MOST_CHARS = 200


class Call(msgspec.Struct, frozen=True):
    """One request: `said` is what user and assistant said in turns, the user first and last."""

    system: str
    said: tuple[str, ...]
    max_tokens: int


class Piece(msgspec.Struct, frozen=True):
    """What an event brings: text of the answer (`has_tokens` also for reasoning and tool calls), or usage, or both."""

    text: str = ""
    has_tokens: bool = False
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None


class Api:
    """Asks `model` at `client` through one of BACKENDS; `extra` fields go into every body, over those that are there."""

    def __init__(
        self,
        client: HttpClient,
        model: str,
        *,
        backend: str = "openai",
        endpoint: str | None = None,
        temperature: float | None = 0.0,
        ignore_eos: bool = False,
        extra: Mapping[str, Any] | None = None,  # Any: JSON
    ) -> None:
        self.client, self.model = client, model
        self.path = endpoint or BACKENDS[backend]
        self._is_chat = backend == "openai-chat"
        self._common: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._common |= {} if temperature is None else {"temperature": temperature}
        self._common |= {"ignore_eos": True} if ignore_eos else {}
        self._extra = dict(extra or {})

    def body(self, call: Call) -> bytes:
        """The JSON that is sent for `call`."""
        fields = dict(self._common)
        if self._is_chat:
            roles = ("user", "assistant")
            messages = [{"role": "system", "content": call.system}] if call.system else []
            messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(call.said)]
            fields |= {"messages": messages, "max_completion_tokens": call.max_tokens}
        else:
            texts = [call.system, *call.said] if call.system else call.said
            fields |= {"prompt": "\n\n".join(texts), "max_tokens": call.max_tokens}
        return msgspec.json.encode(fields | self._extra)

    async def ask(self, call: Call) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer. Raises FailedError where there is none or it breaks off."""
        is_finished = False
        async with contextlib.aclosing(self.client.events(self.path, self.body(call))) as events:
            async for data in events:
                if data == b"[DONE]":
                    is_finished = True
                    break
                event = _decode(data)
                if event.error is not None:
                    raise FailedError(_told(event.error))
                is_finished |= any(choice.finish_reason is not None for choice in event.choices or ())
                yield _piece(event)
        if not is_finished:
            raise FailedError("the stream broke off")


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None  # Any: only whether there are some


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: Sequence[_Choice] | None = ()
    usage: _Usage | None = None
    error: Any = None  # Any: an object or a text


def _decode(data: bytes) -> _Event:
    try:
        return msgspec.json.decode(data, type=_Event)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FailedError(f"an event that is none of this API's: {error}") from error


def _piece(event: _Event) -> Piece:
    text, has_tokens = "", False
    for choice in event.choices or ():
        delta = choice.delta or _Delta()
        said = choice.text or delta.content or ""
        text += said
        has_tokens |= bool(said or delta.reasoning_content or delta.reasoning or delta.tool_calls)
    usage = event.usage
    if usage is None:
        return Piece(text, has_tokens)
    details = usage.prompt_tokens_details
    return Piece(
        text,
        has_tokens,
        usage.prompt_tokens,
        usage.completion_tokens,
        None if details is None else details.cached_tokens,
    )


def _told(error: Any) -> str:  # Any: an object or a text
    text = error.get("message") if isinstance(error, dict) else error
    return f"in the stream: {' '.join(str(text).split())[:_MOST_CHARS]}"

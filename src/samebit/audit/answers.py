"""Answers of OpenAI-compatible servers in one form, and what differs between two of them. Knows no connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from samebit.audit.http import RefusedError


class Token(NamedTuple):
    """A token with its logprob (None: the server tells none here) and its alternatives in the server's order."""

    text: str
    logprob: float | None
    tops: tuple[tuple[str, float], ...]


class Answer(NamedTuple):
    """What came back. `tokens` and `token_ids` are empty where the server does not tell them, `cached_tokens` is None."""

    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...]
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int | None


class Unequal(NamedTuple):
    """The first difference of two answers: the token's place (-1: not known) and both values."""

    place: int
    what: str


def read_answer(bodies: Sequence[Any]) -> Answer:  # Any: JSON
    """One body of a plain answer, or all events of a streamed one. Raises RefusedError for what has no choices."""
    text, reason, tokens, ids, prompt_ids, cached = "", None, list[Token](), list[int](), list[int](), None
    has_choice = False
    for body in bodies:
        if not isinstance(body, dict) or "error" in body:
            raise RefusedError(f"no answer: {str(body)[:200]}")
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens", cached)
        prompt_ids = body.get("prompt_token_ids") or prompt_ids
        for choice in body.get("choices") or []:
            has_choice = True
            message = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or message.get("content") or ""
            reason = choice.get("finish_reason") or reason
            tokens += _tokens(choice.get("logprobs") or {})
            ids += choice.get("token_ids") or []
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
    if not has_choice:
        raise RefusedError(f"an answer without choices: {str(bodies)[:200]}")
    return Answer(text, reason, tuple(tokens), tuple(ids), tuple(prompt_ids), cached)


def first_unequal(one: Answer, other: Answer) -> Unequal | None:
    """The first difference in tokens, their logprobs, and the answer as a whole; None if all that both tell is equal."""
    found = [*_unequal_ids(one, other), *_unequal_tokens(one, other)]
    if found:
        return min(found, key=lambda unequal: unequal.place)
    for name in ("text", "finish_reason"):
        values = getattr(one, name), getattr(other, name)
        if values[0] != values[1]:
            return Unequal(-1, f"{name} {values[0]!r} and {values[1]!r}")
    lengths = len(one.tokens), len(other.tokens)
    return Unequal(min(lengths), f"{lengths[0]} and {lengths[1]} tokens") if lengths[0] != lengths[1] else None


def _unequal_ids(one: Answer, other: Answer) -> Iterator[Unequal]:
    for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            yield Unequal(place, f"token id {a} and {b}")


def _unequal_tokens(one: Answer, other: Answer) -> Iterator[Unequal]:
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a.text != b.text:
            yield Unequal(place, f"token {a.text!r} and {b.text!r}")
        elif a.logprob != b.logprob:
            yield Unequal(place, f"logprob of {a.text!r}: {a.logprob!r} and {b.logprob!r}")
        elif a.tops != b.tops:
            yield Unequal(place, f"alternatives of {a.text!r}: {a.tops} and {b.tops}")


def _tokens(logprobs: dict[str, Any]) -> list[Token]:  # Any: JSON
    """From the completions shape or from the chat shape."""
    if "tokens" in logprobs:
        names = logprobs["tokens"]
        values = logprobs.get("token_logprobs") or [None] * len(names)
        tops = logprobs.get("top_logprobs") or [None] * len(names)
        return [Token(n, v, tuple((t or {}).items())) for n, v, t in zip(names, values, tops, strict=True)]
    return [
        Token(
            item["token"],
            item.get("logprob"),
            tuple((top["token"], top["logprob"]) for top in item.get("top_logprobs") or []),
        )
        for item in logprobs.get("content") or []
    ]

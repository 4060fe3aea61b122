"""One server under audit: what it can do, how requests are spelled for it, and sending them alone or together."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from samebit.audit.answers import Answer, read_answer
from samebit.audit.http import HttpClient, RefusedError
from samebit.core.errors import ConfigError

_NUM_TOP = 3
_UNAUTHORISED = (401, 403)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the server understands. `completions` false: only chat. `cached_tokens`: usage tells what was a cache hit."""

    completions: bool
    logprobs: bool
    seed: bool
    streaming: bool
    echo: bool
    token_ids: bool
    cache_salt: bool
    ignore_eos: bool
    cached_tokens: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: where it goes, and its JSON."""

    path: str
    body: dict[str, Any]  # Any: JSON


class Session:
    """Owner of the connection. `nonce` makes prompts that the server has not seen before."""

    def __init__(self, client: HttpClient, model: str, seed: int) -> None:
        self.client = client
        self.model = model
        self.seed = seed
        self._nonces = 0
        self._fresh = secrets.token_hex(4)
        self.fingerprint = ""
        self.abilities = self._probe()

    def nonce(self) -> str:
        """A line that no prompt began with before."""
        self._nonces += 1
        return f"# {self._fresh}-{self._nonces}\n"

    def rng(self, *parts: object) -> random.Random:
        """Random numbers that depend on the seed and on `parts` only."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, parts))}")

    def ask(self, prompt: str | list[int], *, max_tokens: int, **fields: Any) -> Ask:  # Any: JSON
        """A greedy request unless `fields` say otherwise; it asks for all that the server can tell of tokens."""
        can = self.abilities
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if can.completions:
            body |= {"prompt": prompt} | ({"logprobs": _NUM_TOP} if can.logprobs else {})
        else:
            body |= {"messages": [{"role": "user", "content": prompt}]}
            body |= {"logprobs": True, "top_logprobs": _NUM_TOP} if can.logprobs else {}
        body |= {"return_token_ids": True} if can.token_ids else {}
        body |= {"ignore_eos": True} if can.ignore_eos else {}
        return Ask("/completions" if can.completions else "/chat/completions", body | fields)

    def send(self, ask: Ask) -> Answer:
        """One answer. Raises RefusedError or SpentError."""
        return read_answer([self.client.post(ask.path, ask.body)])

    def stream(self, ask: Ask, *, most: int | None = None) -> Answer:
        """A streamed answer, put together from its events; after `most` of them the connection is closed."""
        return read_answer(self.client.events(ask.path, ask.body | {"stream": True}, most=most))

    def send_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at the same time; answers are in order."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return list(pool.map(self.send, asks))

    def _probe(self) -> Abilities:
        """Ask for one feature at a time. Raises ConfigError when neither endpoint answers."""
        plain: dict[str, Any] = {"model": self.model, "max_tokens": 2, "temperature": 0}
        text = Ask("/completions", plain | {"prompt": "def f("})
        chat = Ask("/chat/completions", plain | {"messages": [{"role": "user", "content": "def f("}]})
        by_text = self._try(text)
        is_text, answer = (True, by_text) if isinstance(by_text, Answer) else (False, self._try(chat))
        if isinstance(answer, RefusedError):
            raise ConfigError(f"{self.client.url}: no completions ({by_text}) and no chat ({answer})")
        base = text if is_text else chat
        asking = {"logprobs": _NUM_TOP} if is_text else {"logprobs": True, "top_logprobs": _NUM_TOP}
        scored = self._with(base, **asking)
        numbered = self._with(base, return_token_ids=True)
        echoed = self._with(base, echo=True, logprobs=1) if is_text else None
        return Abilities(
            completions=is_text,
            logprobs=bool(scored and scored.tokens),
            seed=self._with(base, seed=1, temperature=1) is not None,
            streaming=self._streams(base),
            echo=bool(echoed and len(echoed.tokens) > base.body["max_tokens"]),
            token_ids=bool(numbered and numbered.token_ids),
            cache_salt=self._with(base, cache_salt="audit") is not None,
            ignore_eos=self._with(base, ignore_eos=True) is not None,
            cached_tokens=answer.cached_tokens is not None,
        )

    def _try(self, ask: Ask) -> Answer | RefusedError:
        try:
            body = self.client.post(ask.path, ask.body)
            answer = read_answer([body])
        except RefusedError as error:
            if error.status in _UNAUTHORISED:
                raise ConfigError(f"{self.client.url}: {error}") from error
            return error
        self.fingerprint = str(body.get("system_fingerprint") or self.fingerprint)
        return answer

    def _with(self, base: Ask, **fields: Any) -> Answer | None:  # Any: JSON
        """The answer to `base` with more fields; None if they are refused."""
        answer = self._try(Ask(base.path, base.body | fields))
        return answer if isinstance(answer, Answer) else None

    def _streams(self, base: Ask) -> bool:
        try:
            return bool(self.stream(base).text)
        except RefusedError:
            return False


def choose_model(client: HttpClient, wanted: str | None) -> str:
    """The model to audit: the one asked for, or the first that the server lists. Raises ConfigError."""
    if wanted is not None:
        return wanted
    try:
        return str(client.get("/models")["data"][0]["id"])
    except RefusedError as error:
        raise ConfigError(f"{client.url}: cannot list models ({error}); name one with --model") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{client.url}: lists no model; name one with --model") from error

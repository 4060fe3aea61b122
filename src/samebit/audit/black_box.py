"""The black-box audit: every promise put to a server over HTTP, and a small script of requests for each that is broken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from samebit.audit.battery import PROMISES, NotCheckableError, Promise, Sent, Size, Talk
from samebit.audit.http import HttpClient, Limits, RefusedError, SpentError
from samebit.audit.session import Session, choose_model
from samebit.audit.values import BlackBoxReport, Check, Environment, Verdict

_MAX_TOKENS = 32
_PROMPT_CHARS = 1000
_SHORTEST_PROMPT = 30

OnCheck = Callable[[Check], None]


def audit_server(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    promises: Sequence[Promise] = PROMISES,
    on_check: OnCheck | None = None,
) -> BlackBoxReport:
    """Audit the server whose OpenAI-compatible API lies at `url`. Raises ConfigError when nothing there can be asked."""
    started = time.monotonic()
    environment = Environment.here()
    client = HttpClient(url, api_key, limits or Limits())
    session = Session(client, choose_model(client, model), seed)
    checks = []
    for promise in promises:
        checks.append(_check(session, promise))
        if on_check is not None:
            on_check(checks[-1])
    comparisons = sum(check.comparisons for check in checks)
    is_broken = any(check.verdict == "broken" for check in checks)
    return BlackBoxReport(
        url=client.url,
        model=session.model,
        system_fingerprint=session.fingerprint,
        abilities=asdict(session.abilities),
        environment=environment,
        seed=seed,
        status=1 if is_broken else 0 if any(check.verdict == "holds" for check in checks) else 2,
        seconds=time.monotonic() - started,
        num_requests=client.num_requests,
        comparisons=comparisons,
        checks=checks,
    )


def _check(session: Session, promise: Promise) -> Check:
    """All rounds of one promise, or those up to the first difference."""
    comparisons, hits, trouble = 0, 0, ""
    for number in range(promise.num_rounds):
        talk = Talk(session, Size(number, _MAX_TOKENS, promise.company, _PROMPT_CHARS))
        try:
            promise.trial(talk)
        except (NotCheckableError, RefusedError, SpentError) as error:
            trouble = str(error)
        comparisons, hits = comparisons + talk.comparisons, hits + talk.hits
        if talk.unequal is not None:
            smaller = _shrink(session, promise, talk)
            assert smaller.unequal is not None, "only a talk with a difference is kept"
            where = f"token {smaller.unequal.place}: " if smaller.unequal.place >= 0 else ""
            lines = _script(session, smaller.sent)
            return _verdict(promise, "broken", comparisons, where + smaller.unequal.what, lines)
        if trouble:
            return _verdict(promise, "not checkable", comparisons, trouble)
    if not promise.needs_hits:
        return _verdict(promise, "holds", comparisons, _scope(session))
    if not session.abilities.cached_tokens:
        return _verdict(promise, "holds", comparisons, _scope(session) + "; the server does not tell what was cached")
    if not hits:
        return _verdict(promise, "not checkable", comparisons, "by the server's own account, nothing was a cache hit")
    return _verdict(promise, "holds", comparisons, _scope(session) + f"; {hits} cache hits")


def _shrink(session: Session, promise: Promise, talk: Talk) -> Talk:
    """The smallest trial found that still shows a difference: a shorter answer, less company, shorter prompts."""
    best = talk
    for smaller in (_shorter_answer, _less_company, _shorter_prompt):
        while (size := smaller(best)) is not None:
            again = Talk(session, size)
            try:
                promise.trial(again)
            except (NotCheckableError, RefusedError, SpentError):
                break
            if again.unequal is None:
                break
            best = again
    return best


def _shorter_answer(talk: Talk) -> Size | None:
    assert talk.unequal is not None, "only a talk with a difference is made smaller"
    enough = talk.unequal.place + 1
    return talk.size._replace(max_tokens=enough) if 0 < enough < talk.size.max_tokens else None


def _less_company(talk: Talk) -> Size | None:
    return talk.size._replace(company=talk.size.company // 2) if talk.size.company > 1 else None


def _shorter_prompt(talk: Talk) -> Size | None:
    half = talk.size.prompt_chars // 2
    return talk.size._replace(prompt_chars=half) if half >= _SHORTEST_PROMPT else None


def _script(session: Session, sent: Sequence[Sent]) -> list[str]:
    """Shell lines that send the same. A prompt's first line is a nonce: to see a cold prefix again, change its number."""
    lines = []
    for how, asks in sent:
        body = {} if how == "plain" else {"stream": True}
        curls = [session.client.curl(ask.path, ask.body | body) for ask in asks]
        if how == "broken off":
            curls = [f"{line} -N | head -n 5" for line in curls]
        lines += curls if len(curls) == 1 else [*(f"{line} &" for line in curls), "wait"]
    return lines


def _scope(session: Session) -> str:
    return "tokens and logprobs" if session.abilities.logprobs else "text only: the server tells no logprobs"


def _verdict(promise: Promise, verdict: Verdict, comparisons: int, detail: str, reproduce: Sequence[str] = ()) -> Check:
    return Check(
        name=promise.name,
        promise=promise.claim,
        verdict=verdict,
        comparisons=comparisons,
        detail=detail,
        reproduce=list(reproduce),
    )

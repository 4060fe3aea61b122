"""How the latest requests came about: when they arrived, what each step did for them, how they ended. Knows numbers, no text.

Kept for every request while it is open, and for as many that have ended as fit the limits. A step costs a few numbers a row.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

from samebit.core.plan import PlanRow
from samebit.core.request import Request
from samebit.engine.cache_view import Place, label_of
from samebit.engine.views import Attachment, Kind, Look, RequestsView, RequestView, StepView
from samebit.state.nodes import Node

MAX_ENDED = 128
MAX_ROWS = 1 << 16
MAX_SHOWN = 64
MAX_NEW_ROWS = 1 << 13
_FIELDS = 6
_packed = Struct(f"{_FIELDS}d").pack
_EPOCH_S = time.time() - time.monotonic()


@dataclass(slots=True)
class _Record:
    """One request. `rows` holds `_FIELDS` numbers a step: start, end, first position, tokens, guesses, accepted ones.

    Nodes are only looked at while the cache has them. `end`: how many positions its steps have done. `fold`: what was made of `rows` for
    those who looked.
    """

    name: str
    salt: str
    num_prompt: int
    arrived_s: float
    rows: array[float] = field(default_factory=lambda: array("d"))
    end: int = 0
    admitted_s: float | None = None
    ended_s: float | None = None
    finish_reason: str | None = None
    attachment: Attachment | None = None
    attached: weakref.ref[Node] | None = None
    matched: weakref.ref[Node] | None = None
    fold: _Fold | None = None


class Timeline:
    """Owner of what is remembered of requests. Times are of `time.monotonic`."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._num_open = 0
        self._num_rows = 0  # of those that have ended

    def arrived(self, request: Request, now_s: float) -> None:
        """A request was taken on."""
        name = request.request_id
        self._drop(name)
        self._records[name] = _Record(name, request.cache_salt, len(request.prompt_token_ids), now_s)
        self._num_open += 1
        self._forget()

    def admitted(self, name: str, place: Place, now_s: float) -> None:
        """A request's first step begins, at that place of the cache."""
        record = self._records.get(name)
        if record is not None and record.ended_s is None:
            record.admitted_s, record.attachment = now_s, place.attachment
            record.attached = None if place.attached is None else weakref.ref(place.attached)
            record.matched = None if place.matched is None else weakref.ref(place.matched)

    def step(self, rows: Sequence[PlanRow], accepted: Sequence[int], start_s: float, end_s: float) -> None:
        """A step did `rows`, and so many of each one's guesses were accepted."""
        records = self._records
        for row, count in zip(rows, accepted, strict=True):
            record = records.get(row.request_id)
            # A token that was computed ahead, and in vain, is no part of a request that has ended; storing its state is.
            if record is not None and (record.ended_s is None or not row.num_tokens):
                # A row that was planned before its guesses were verified begins where the one before it came to end.
                start = record.end if row.num_tokens and not row.token_ids else row.start
                record.rows.frombytes(_packed(start_s, end_s, start, row.num_tokens, row.num_drafts, count))
                record.end = start + row.num_tokens - row.num_drafts + count
                self._num_rows += record.ended_s is not None

    def ended(self, name: str, reason: str, now_s: float) -> None:
        """A request is over."""
        record = self._records.get(name)
        if record is not None and record.ended_s is None:
            record.ended_s, record.finish_reason = now_s, reason
            self._num_open -= 1
            self._num_rows += len(record.rows) // _FIELDS

    def view(self, look: Look) -> RequestsView:
        """The latest requests that `look` may see, or those of the name it gives, with each of their steps.

        Nobody who looks holds the engine up for long: of many new steps some are left for the next look.
        """
        if look.name is not None:
            return RequestsView(requests=[_view(record, _whole(record)) for record in self._named(look.name)])
        visible = [record for record in self._records.values() if _may_see(look, record)]
        shown, room = visible[-MAX_SHOWN:], MAX_NEW_ROWS
        folds: list[_Fold] = []
        for record in reversed(shown):
            if record.fold is None:
                record.fold = _Fold(record.arrived_s, record.num_prompt, is_whole=False)
            room -= record.fold.take(record.rows, room)
            folds.append(record.fold)
        requests = [_view(record, fold) for record, fold in zip(shown, reversed(folds), strict=True)]
        return RequestsView(requests=requests, num_hidden=len(self._records) - len(visible))

    def place(self, look: Look) -> Place | None:
        """Where the request that `look` names attached, or the latest admitted one that it may see."""
        named = self._records.values() if look.name is None else self._named(look.name)
        for record in reversed(list(named)):
            if record.attachment is not None and (look.name is not None or _may_see(look, record)):
                return Place(record.attachment, _alive(record.attached), _alive(record.matched))
        return None

    def _named(self, name: str) -> list[_Record]:
        """The requests of an answer, which are called by its id and a number, or the one with that label."""
        return [r for r in self._records.values() if name in (r.name.rpartition("-")[0], label_of(r.name))]

    def _forget(self) -> None:
        """Let go of the oldest requests that have ended, while there are too many or they hold too much."""
        while len(self._records) - self._num_open > MAX_ENDED or self._num_rows > MAX_ROWS:
            oldest = next((record for record in self._records.values() if record.ended_s is not None), None)
            if oldest is None:
                return
            self._drop(oldest.name)

    def _drop(self, name: str) -> None:
        record = self._records.pop(name, None)
        if record is not None and record.ended_s is None:
            self._num_open -= 1
        elif record is not None:
            self._num_rows -= len(record.rows) // _FIELDS


def _whole(record: _Record) -> _Fold:
    fold = _Fold(record.arrived_s, record.num_prompt, is_whole=True)
    fold.take(record.rows, len(record.rows))
    return fold


def _view(record: _Record, fold: _Fold) -> RequestView:
    return RequestView(
        label=label_of(record.name),
        tenant=label_of(record.salt),
        arrived_s=round(_EPOCH_S + record.arrived_s, 6),
        admitted_s=_since(record.arrived_s, record.admitted_s),
        ended_s=_since(record.arrived_s, record.ended_s),
        num_prompt_tokens=record.num_prompt,
        num_cached_tokens=record.attachment.num_attached if record.attachment else 0,
        num_drawn_tokens=fold.num_drawn,
        finish_reason=record.finish_reason,
        attachment=record.attachment,
        steps=fold.steps(),
    )


@dataclass(slots=True)
class _Sums:
    """A step in the making, or several of one request in a row."""

    kind: Kind
    start_s: float
    end_s: float
    first: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    num_drawn: int
    num_steps: int = 1

    def add(self, end_s: float, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """Take in the next step, which draws."""
        self.kind = "verify" if num_drafts else self.kind
        self.end_s = end_s
        self.num_tokens += num_tokens
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        self.num_drawn += num_accepted + 1
        self.num_steps += 1

    def view(self, arrived_s: float) -> StepView:
        """The same for those who ask."""
        return StepView(
            kind=self.kind,
            start_s=round(self.start_s - arrived_s, 6),
            end_s=round(self.end_s - arrived_s, 6),
            first=self.first,
            num_tokens=self.num_tokens,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            num_drawn=self.num_drawn,
            num_steps=self.num_steps,
        )


@dataclass(slots=True)
class _Fold:
    """Makes steps of rows as they come; unless `is_whole`, decoding that was never interrupted is one, guesses verified or not.

    A row draws if it reaches the last token that was known, and then one more than is accepted. `num_taken`: numbers of rows so far;
    `end`: where the last row ended, without guesses; `held`: decoding that may go on.
    """

    arrived_s: float
    known: int
    is_whole: bool
    num_taken: int = 0
    end: int = 0
    num_drawn: int = 0
    done: list[StepView] = field(default_factory=list)
    held: _Sums | None = None

    def take(self, rows: array[float], most: int) -> int:
        """Go on with at most `most` more of `rows`; returns how many that were."""
        numbers = rows[self.num_taken : self.num_taken + most * _FIELDS]
        for start_s, end_s, *counts in zip(*[iter(numbers)] * _FIELDS, strict=True):
            self._take(start_s, end_s, *map(int, counts))
        self.num_taken += len(numbers)
        return len(numbers) // _FIELDS

    def steps(self) -> list[StepView]:
        """All steps so far."""
        return self.done if self.held is None else [*self.done, self.held.view(self.arrived_s)]

    def _take(
        self, start_s: float, end_s: float, first: int, num_tokens: int, num_drafts: int, num_accepted: int
    ) -> None:
        end, before = first + num_tokens - num_drafts, self.end
        num_drawn = num_accepted + 1 if num_tokens and end >= self.known else 0
        self.known, self.end, self.num_drawn = self.known + num_drawn, end, self.num_drawn + num_drawn
        is_drawing = num_drawn > 0 and end - first == 1
        if self.held is not None and is_drawing and not self.is_whole and first >= before:
            self.held.add(end_s, num_tokens, num_drafts, num_accepted)
            return
        if self.held is not None:
            self.done.append(self.held.view(self.arrived_s))
        kind: Kind = ("verify" if num_drafts else "decode") if is_drawing else ("prefill" if num_tokens else "publish")
        sums = _Sums(kind, start_s, end_s, first, num_tokens, num_drafts, num_accepted, num_drawn)
        self.held = sums if is_drawing else None
        if not is_drawing:
            self.done.append(sums.view(self.arrived_s))


def _may_see(look: Look, record: _Record) -> bool:
    return look.is_admin or not record.salt or record.salt == look.salt


def _since(start_s: float, moment_s: float | None) -> float | None:
    return None if moment_s is None else round(moment_s - start_s, 6)


def _alive(node: weakref.ref[Node] | None) -> Node | None:
    return None if node is None else node()

"""A device in plain integers and an independent cold oracle: one wrong page, row, tag or boundary changes a token at once.

`FakeRunner` executes plans as a real runner does, from what the plan's ids reach and nothing else: it never sees a
request. Each mixer folds exactly the values that it may see (K conv inputs, or the window's keys) into a 64-bit hash.
`ColdModel` computes the same hashes from a token list. Poison is always on. Knows no torch and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile, zip_longest

import msgspec

from samebit.core.plan import (
    NO_SNAPSHOT,
    BatchPlan,
    CheckpointEntry,
    PlanRow,
    PlanSample,
    RetiredIds,
    StepOutput,
    owner_tag,
    position_tag,
)
from samebit.core.request import Request, TokenLogprobs
from samebit.state.layout import SINK_ROW, ZERO_ROW, ConvStream, KvLayer, PageGroup, StateGeometry, StateLayout

VOCAB = 61


def make_geometry(
    *, windows: tuple[int | None, ...] = (6, None), kernel_size: int = 4, streams: int = 3, layers: int = 1, **sizes
) -> StateGeometry:
    """Small and odd on purpose: pages of 4, a window of 6, K = 4."""
    kv = (KvLayer(1, 1),) * layers
    layout = StateLayout(
        groups=tuple(PageGroup(window, kv) for window in windows),
        streams=tuple(ConvStream(f"stream{i}", 1) for i in range(streams)),
        kernel_size=kernel_size,
    )
    settings = {
        "page_size": 4,
        "num_slots": 4,
        "num_snapshots": 16,
        "num_pages": (60,) * len(windows),
        "max_length": 64,
    }
    return StateGeometry(layout=layout, **{**settings, **sizes})


def logits_rows(plan: BatchPlan) -> list[PlanSample]:
    """The samples of a plan, one for each logits row."""
    return [
        msgspec.structs.replace(sample, offset=sample.offset + place, count=1)
        for sample in plan.samples
        for place in range(sample.count)
    ]


@dataclass(frozen=True)
class Mixer:
    """A short convolution over `stream`, or attention of `layer` in `group`, over the last `span` values (None: all)."""

    number: int
    span: int | None
    stream: int = -1
    layer: int = -1
    group: int = -1


def list_mixers(layout: StateLayout) -> list[Mixer]:
    """Convolutions and attention layers in turn, as a value passes through them."""
    convs = [(layout.kernel_size, s, -1, -1) for s in range(len(layout.streams))]
    groups = [g for g, group in enumerate(layout.groups) for _ in group.layers]
    attentions = [(layout.groups[g].window, -1, layer, g) for layer, g in enumerate(groups)]
    turns = [turn for pair in zip_longest(convs, attentions) for turn in pair if turn is not None]
    return [Mixer(number, *turn) for number, turn in enumerate(turns)]


def draw(value: int, settings: tuple, banned: Iterable[int]) -> int:
    """The token that a final value and sampling settings lead to."""
    token = hash((value, *settings)) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def score(value: int, token: int) -> float:
    """A stand-in for a logprob that tells almost all values apart."""
    return -float(hash((value, token)) % 2**40)


class ColdModel:
    """Values of every mixer over a token list, from nothing but the tokens: `past[m]` are mixer m's inputs."""

    def __init__(self, layout: StateLayout) -> None:
        self.mixers = list_mixers(layout)
        self.past: list[list[int]] = [[0] * (m.span - 1) if m.stream >= 0 else [] for m in self.mixers]
        self.num_tokens = 0

    def feed(self, token: int) -> int:
        """The final value after one more token."""
        value = hash((token, self.num_tokens))
        self.num_tokens += 1
        for mixer, past in zip(self.mixers, self.past, strict=True):
            past.append(value)
            value = hash((mixer.number, *past[-mixer.span if mixer.span else 0 :]))
        return value


@dataclass(frozen=True)
class Answer:
    """What a request must get: (token, score) of every output and of every prompt token that is to be scored."""

    outputs: list[tuple[int, float]]
    prompt: list[tuple[int, float]]
    finish_reason: str


def answer(layout: StateLayout, request: Request, max_length: int) -> Answer:
    """The oracle: `request` on a model that has never seen another."""
    params, model = request.params, ColdModel(layout)
    stops = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)]
    room = max_length - len(request.prompt_token_ids)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p, request.seed, request.sample_index)
    values = [model.feed(token) for token in request.prompt_token_ids]
    scored = range(max(1, request.prompt_logprobs_start), len(values)) if params.prompt_logprobs is not None else ()
    prompt = [(t, score(values[i - 1], t)) for i in scored for t in [request.prompt_token_ids[i]]]
    outputs: list[tuple[int, float]] = []
    while True:
        token = draw(values[-1], settings, stops if len(outputs) < params.min_tokens else [])
        outputs.append((token, score(values[-1], token)))
        if token in stops and len(outputs) >= params.min_tokens:
            return Answer(outputs, prompt, "stop")
        if len(outputs) >= min(room, params.max_tokens or room):
            return Answer(outputs, prompt, "length")
        values.append(model.feed(token))


@dataclass(frozen=True)
class _Row:
    """A batch row as the device sees it; `reads` are (pool row, expected tag) of the K-1 positions before `start`."""

    plan: PlanRow
    start: int
    token_ids: list[int]
    tag: int
    reads: list[tuple[int, int]]


class FakeRunner:
    """Implements Runner. `skip` names writes that do not happen: ("entry", stream, row), ("ring", stream), ("stamp", layer).

    `guess(request_id, num_known)` gives the drafts of a request with so many tokens. `not_finite` are request ids whose logits are NaN. `written_pages` (group, page) and `written_snapshots` are those of
    the last step.
    """

    def __init__(self, geometry: StateGeometry) -> None:
        self.geometry, self.layout = geometry, geometry.layout
        self.mixers = list_mixers(self.layout)
        self.skip: set[tuple] = set()
        self.not_finite: set[str] = set()
        self.guess: Callable[[str, int], list[int]] = lambda _id, num_known: [num_known % VOCAB]
        self._junk = 0
        slots, pages = geometry.num_slots + 1, geometry.pages_per_sequence
        streams, groups = range(len(self.layout.streams)), range(len(self.layout.groups))
        self.rows = [[0, *(self._poison() for _ in range(geometry.num_rows - 1))] for _ in streams]
        self.row_tags = [[0, *(self._poison() for _ in range(geometry.num_rows - 1))] for _ in streams]
        counts = [geometry.num_pages[m.group] + 1 for m in self.mixers if m.layer >= 0]
        self.kv = [[[self._poison() for _ in range(geometry.page_size)] for _ in range(n)] for n in counts]
        self.page_tags = [[self._poison() for _ in range(n)] for n in counts]
        self.length, self.next_token = [0] * slots, [0] * slots
        self.drafts: list[list[int]] = [[] for _ in range(slots)]
        self.ring_tags = [[0] * geometry.ring_length for _ in range(slots)]
        self.page_table = [[[0] * pages for _ in range(slots)] for _ in groups]
        self.page_stamps = [[[0] * pages for _ in range(slots)] for _ in groups]
        self.written_pages: set[tuple[int, int]] = set()
        self.written_snapshots: set[int] = set()

    def execute(self, plan: BatchPlan) -> StepOutput:
        """One step, mixer by mixer, all rows together."""
        self._wipe(plan.retired)
        self.written_pages, self.written_snapshots = set(), set()
        for delta in plan.page_deltas:
            self.page_table[delta.group][delta.slot][delta.index] = delta.page
            self.page_stamps[delta.group][delta.slot][delta.index] = delta.stamp
        rows = [self._row(row, plan.step) for row in plan.rows]
        intact = [all(tags[place] == tag for tags in self.row_tags for place, tag in row.reads) for row in rows]
        values = [[hash((token, row.start + i)) for i, token in enumerate(row.token_ids)] for row in rows]
        for mixer in self.mixers:
            if mixer.stream >= 0:
                values = self._convolve(mixer, rows, values, plan.entries)
            else:
                values = self._attend(mixer, rows, values)
        self._record(rows)
        wanted = logits_rows(plan)
        samples = [self._sample(sample, rows[sample.row], values[sample.row]) for sample in wanted]
        accepted = [self._accept(number, row, wanted, samples) for number, row in enumerate(rows)]
        pages = [self._pages_intact(rows[entry.row].plan.slot, entry.boundary) for entry in plan.entries]
        written = [self._is_written(entry) for entry in plan.entries]
        drafts = [self._draft(plan.rows[draft.row]) for draft in plan.drafts]
        nobody_knows = [[1.0] * len(guesses) for guesses in drafts]
        finite = [plan.rows[sample.row].request_id not in self.not_finite for sample in wanted]
        return StepOutput(plan.step, samples, finite, accepted, intact, pages, written, drafts, nobody_knows)

    def damage_snapshot(self, snapshot: int, stream: int, row: int) -> None:
        """Lose one conv row of a checkpoint."""
        place = self.geometry.snapshot_base(snapshot) + row
        self.rows[stream][place], self.row_tags[stream][place] = self._poison(), self._poison()

    def damage_page(self, layer: int, page: int) -> None:
        """Lose one layer's page."""
        self.kv[layer][page] = [self._poison() for _ in self.kv[layer][page]]
        self.page_tags[layer][page] = self._poison()

    def _poison(self) -> int:
        self._junk += 1
        return hash((-7, self._junk))

    def _wipe(self, retired: RetiredIds) -> None:
        for group, page in retired.pages:
            for mixer in self.mixers:
                if mixer.group == group:
                    self.damage_page(mixer.layer, page)
        geometry = self.geometry
        spans = [(geometry.snapshot_base(s), self.layout.history) for s in retired.snapshots]
        spans += [(geometry.ring_base(s), geometry.ring_length) for s in retired.slots]
        for first, count in spans:
            for rows, tags in zip(self.rows, self.row_tags, strict=True):
                rows[first : first + count] = [self._poison() for _ in range(count)]
                tags[first : first + count] = [self._poison() for _ in range(count)]

    def _row(self, row: PlanRow, step: int) -> _Row:
        start, token_ids = row.start, row.token_ids
        if row.num_tokens and not token_ids:
            start, token_ids = (
                self.length[row.slot],
                [self.next_token[row.slot], *self.drafts[row.slot]][: row.num_tokens],
            )
        assert len(token_ids) == row.num_tokens, "a row names all its tokens or none"
        reads = [self._history(row, start, start - i) for i in range(self.layout.history, 0, -1)]
        return _Row(row, start, token_ids, owner_tag(step, row.owner), reads)

    def _history(self, row: PlanRow, start: int, position: int) -> tuple[int, int]:
        if row.resume_snapshot:
            oldest = start - self.layout.history
            return self.geometry.snapshot_base(row.resume_snapshot) + position - oldest, row.resume_tag
        if position < 0:
            return ZERO_ROW, 0
        ring, slot = self.geometry.ring_length, row.slot
        # What guesses may have overwritten is not taken for what was there.
        is_gone = position < self.length[slot] + self.geometry.max_drafts - ring
        return self.geometry.ring_base(slot) + position % ring, self.ring_tags[slot][position % ring] ^ is_gone

    def _ring_writes(self, row: _Row) -> list[tuple[int, int, int]]:
        """(place in the ring, tag, index) of what a row keeps; negative indices are its read rows."""
        ring = self.geometry.ring_length
        first = -self.layout.history if row.plan.resume_snapshot else 0
        kept = range(max(0, len(row.token_ids) - ring), len(row.token_ids))
        indices = [*(i for i in range(first, 0) if row.start + i >= 0), *kept]
        return [((row.start + i) % ring, position_tag(row.tag, row.start + i), i) for i in indices]

    def _convolve(
        self, mixer: Mixer, rows: list[_Row], values: list[list[int]], entries: list[CheckpointEntry]
    ) -> list[list[int]]:
        s, taps = mixer.stream, self.layout.kernel_size
        pool, tags = self.rows[s], self.row_tags[s]
        inputs = [[pool[place] for place, _ in row.reads] + own for row, own in zip(rows, values, strict=True)]
        writes: list[tuple[int, int, int]] = []
        for entry in entries:
            writes += self._entry_writes(s, entry, rows[entry.row], values[entry.row])
        for row, own in zip(rows, inputs, strict=True):
            base = self.geometry.ring_base(row.plan.slot)
            for place, tag, i in self._ring_writes(row) if ("ring", s) not in self.skip else ():
                stale = tags[row.reads[i][0]] ^ row.reads[i][1] if i < 0 else 0
                writes.append((base + place, own[i + self.layout.history], tag ^ stale))
        for place, value, tag in writes:
            assert place not in (ZERO_ROW, SINK_ROW), "a reserved row is written"
            pool[place], tags[place] = value, tag
        return [[hash((mixer.number, *own[i : i + taps])) for i in range(len(own) - taps + 1)] for own in inputs]

    def _entry_writes(
        self, stream: int, entry: CheckpointEntry, row: _Row, values: list[int]
    ) -> list[tuple[int, int, int]]:
        if entry.snapshot == NO_SNAPSHOT:
            return []
        self.written_snapshots.add(entry.snapshot)
        writes, base = [], self.geometry.snapshot_base(entry.snapshot)
        for j, position in enumerate(range(entry.boundary - self.layout.history, entry.boundary)):
            if ("entry", stream, j) in self.skip:
                continue
            if position >= row.start:
                writes.append((base + j, values[position - row.start], entry.tag))
            else:
                place, tag = self._history(row.plan, row.start, position)
                stale = self.row_tags[stream][place] ^ tag
                writes.append((base + j, self.rows[stream][place], entry.tag ^ stale))
        return writes

    def _attend(self, mixer: Mixer, rows: list[_Row], values: list[list[int]]) -> list[list[int]]:
        size, kv = self.geometry.page_size, self.kv[mixer.layer]
        for row, own in zip(rows, values, strict=True):
            table = self.page_table[mixer.group][row.plan.slot]
            for position, value in enumerate(own, row.start):
                page = table[position // size]
                kv[page][position % size] = value
                self.written_pages.add((mixer.group, page))
                if position % size == size - 1 and ("stamp", mixer.layer) not in self.skip:
                    self.page_tags[mixer.layer][page] = position_tag(row.tag, position)
        out = []
        for row, own in zip(rows, values, strict=True):
            table, end = self.page_table[mixer.group][row.plan.slot], row.start + len(own)
            low = max(0, row.start - mixer.span + 1) // size if mixer.span else 0
            keys = [value for page in table[low : -(-end // size)] for value in kv[page]]
            firsts = [max(0, p - mixer.span + 1) if mixer.span else 0 for p in range(row.start, end)]
            spans = [
                (first - low * size, p + 1 - low * size) for first, p in zip(firsts, range(row.start, end), strict=True)
            ]
            out.append([hash((mixer.number, *keys[first:last])) for first, last in spans])
        return out

    def _record(self, rows: list[_Row]) -> None:
        """What the slot tables must say after the step, whether or not the writes happened."""
        size = self.geometry.page_size
        for row in rows:
            slot, end = row.plan.slot, row.start + len(row.token_ids)
            for place, tag, _ in self._ring_writes(row):
                self.ring_tags[slot][place] = tag
            for index in range(row.start // size, end // size):
                for stamps in self.page_stamps:
                    stamps[slot][index] = position_tag(row.tag, (index + 1) * size - 1)

    def _draft(self, row: PlanRow) -> list[int]:
        """As many guesses as a slot has words for, kept for its next step."""
        count = self.geometry.max_drafts
        guesses = [*self.guess(row.request_id, self.length[row.slot] + 1), *[0] * count][:count]
        self.drafts[row.slot] = guesses
        return guesses

    def _accept(self, number: int, row: _Row, wanted: list[PlanSample], samples: list[TokenLogprobs]) -> int:
        """Drafts that are what was drawn in their places; the slot's length and last token follow."""
        drawn = [s.token_id for p, s in zip(wanted, samples, strict=True) if p.row == number and p.target < 0]
        guesses = row.token_ids[len(row.token_ids) - row.plan.num_drafts :]
        assert len(drawn) == len(guesses) + 1 or not guesses, "a draft has no draw in its place"
        pairs = zip(guesses, drawn, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.length[row.plan.slot] = row.start + len(row.token_ids) - len(guesses) + accepted
        if drawn:
            self.next_token[row.plan.slot] = drawn[accepted]
        return accepted

    def _sample(self, sample: PlanSample, row: _Row, values: list[int]) -> TokenLogprobs:
        value, token = values[sample.offset], sample.target
        if token < 0:
            settings = (sample.temperature, sample.top_k, sample.top_p, sample.min_p, sample.seed, sample.sample_index)
            token = draw(value, settings, sample.edits.token_ids)
        top = list(range(sample.num_top))
        return TokenLogprobs(token, score(value, token), 1, top, [0.0] * len(top))

    def _pages_intact(self, slot: int, boundary: int) -> bool:
        size = self.geometry.page_size
        for mixer in self.mixers:
            if mixer.layer < 0:
                continue
            low = max(0, boundary - mixer.span + 1) // size if mixer.span else 0
            table, stamps = self.page_table[mixer.group][slot], self.page_stamps[mixer.group][slot]
            tags = self.page_tags[mixer.layer]
            if any(tags[table[i]] != stamps[i] for i in range(low, boundary // size)):
                return False
        return True

    def _is_written(self, entry: CheckpointEntry) -> bool:
        base = self.geometry.snapshot_base(entry.snapshot)
        places = range(base, base + self.layout.history) if entry.snapshot != NO_SNAPSHOT else ()
        # Nothing was asked for: an answer that nobody may rely on.
        return bool(places) and all(tags[place] == entry.tag for tags in self.row_tags for place in places)

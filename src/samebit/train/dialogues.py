"""Seeded training dialogues and recall probes in Inkling's message format.

Facts are stated, corrected several times and asked for much later, among code, prose, tool calls and JSON answers. Probes use
names and sentences that no training dialogue has. Knows a tokenizer, no model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from samebit.core.errors import ConfigError
from samebit.train.fields import Scalar
from samebit.train.json_answers import json_task, object_pieces
from samebit.train.tokens import TokenStream
from samebit.train.tools import Tool, declaration, declare, tool_use
from samebit.train.transcript import ANSWER, PLAIN, STATED, WORDING, Pieces, Transcript
from samebit.train.words import (
    ACKNOWLEDGED,
    ANSWERS,
    EFFORTS,
    PHRASES,
    SEEN_CODE,
    SHOW_CODE,
    SYSTEM,
    Split,
    Subject,
    subject,
    thing,
)

_SHORT = 1024


@dataclass(slots=True)
class Known:
    """A fact of the dialogue so far. `stated_at`: where its present value begins, in tokens."""

    subject: Subject
    value: str
    stated_at: int = 0
    num_corrections: int = 0
    num_asked: int = 0

    def fill(self, template: str, token_class: int) -> Pieces:
        """The sentence in pieces; the value's has `token_class`, and in an answer the full stop belongs to it."""
        before, mark, after = template.replace("{k}", self.subject.key).partition("{v}")
        if not mark:
            return [(before, PLAIN)]
        # A space opens the token of the word behind it, so that pieces are encoded as the whole would be.
        space = " " if before.endswith(" ") else ""
        ends = after if token_class == ANSWER else ""
        return [
            (before.removesuffix(" "), WORDING if token_class == ANSWER else PLAIN),
            (space + self.value + ends, token_class),
            (after[len(ends) :], PLAIN),
        ]


@dataclass(frozen=True, slots=True)
class Probe:
    """A dialogue that ends with an answer. `value`, `reply`: spans of tokens, the value's with its full stop."""

    token_ids: list[int]
    value: tuple[int, int]
    reply: tuple[int, int]
    distance: int
    num_corrections: int


@dataclass(frozen=True, slots=True)
class ToolProbe:
    """A dialogue that ends with a call of a tool. `prompt`: up to `<|message_model|>`; `reply`: the turn that follows, with its
    end; `tools`: the declarations; `call`: the object with `name` and `args` that the reply holds.
    """

    prompt: list[int]
    reply: list[int]
    tools: list[Mapping[str, Any]]  # Any: JSON
    call: Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class JsonProbe:
    """A dialogue that ends with an answer in JSON. `prompt`, `reply`: as in a `ToolProbe`; `schema`: what the answer must satisfy;
    `expected`: the right answer.
    """

    prompt: list[int]
    reply: list[int]
    schema: Mapping[str, Any]  # Any: JSON
    expected: Mapping[str, Any]  # Any: JSON


class DialogueWriter:
    """Writes one dialogue after another from `seed`; code and prose between facts come from the corpus."""

    def __init__(self, tokenizer: Tokenizer, code: TokenStream, prose: Sequence[str], seed: int, split: Split) -> None:
        if len(code) < _SHORT or not prose:
            raise ConfigError(f"{len(code)} tokens of code and {len(prose)} sentences are too little for dialogues")
        self._rng = random.Random(f"{split} {seed}")
        self._tokenizer, self._code, self._prose, self._split = tokenizer, code, prose, split
        self._begin()

    def dialogue(self, length: int) -> tuple[list[int], list[int]]:
        """Exactly `length` token ids and their classes; the end is cut where it comes."""
        rng = self._rng
        self._begin()
        is_short = length <= _SHORT
        state, ask = (0.24, 0.38) if is_short else (0.14, 0.42)
        most_facts = 14 if is_short else rng.choice((12, 24, 40))
        for _ in range(rng.choice((1, 2, 3))):
            self._state(rng.choice((1, 2)))
        while len(self._out.token_ids) < length:
            draw = rng.random()
            if draw < state and len(self._facts) < most_facts:
                self._state(rng.choice((1, 1, 2, 3)))
            elif draw < state + 0.08:
                self._correct(rng.choice(self._facts))
            elif draw < state + 0.08 + ask:
                self._ask_something()
            elif draw < state + 0.16 + ask:
                self._exotic()
            else:
                self._filler(16, 60 + length // 16)
        return self._out.token_ids[:length], self._out.classes[:length]

    def probe(self, distance: int, num_corrections: int = 0) -> Probe:
        """A question about a fact whose present value was stated about `distance` tokens before the answer's."""
        rng = self._rng
        self._begin(tools=())
        for _ in range(rng.choice((1, 2))):
            self._state(rng.choice((1, 2)))
        fact = self._state(1)
        for _ in range(num_corrections):
            self._filler(16, 80)
            self._correct(fact)
        while (left := distance - self._since(fact)) > 140:
            draw = rng.random()
            others = [f for f in self._facts if f is not fact and f.num_asked < 2]
            if draw < 0.22:
                self._state(1)
            elif draw < 0.45 and others:
                self._ask(rng.choice(others))
            else:
                self._filler(16, max(20, min(260, left - 110)))
        if (left := distance - self._since(fact) - 65) > 4:
            self._show_code(left)
        begin = self._ask(fact)
        end = len(self._out.token_ids) - 2
        value = next(i for i in range(begin, end) if self._out.classes[i] == ANSWER)
        return Probe(self._out.token_ids, (value, end), (begin, end), value - fact.stated_at, num_corrections)

    def tool_probe(self) -> ToolProbe:
        """A question for one of the tools that are declared, after a little talk."""
        self._begin(tools=declare(self._rng, self._split))
        self._small_talk()
        use = tool_use(self._rng, self._tools)
        self._out.message("user", [(use.question, PLAIN)])
        begin = len(self._out.token_ids) + 1
        self._out.call(use)
        ids = self._out.token_ids
        call = {"name": use.name, "args": dict(use.arguments)}
        return ToolProbe(ids[:begin], ids[begin:], [tool.declared for tool in self._tools], call)

    def json_probe(self) -> JsonProbe:
        """A question for JSON that fits a schema, after a little talk."""
        self._begin()
        self._small_talk()
        schema, expected, begin = self._ask_for_object()
        ids = self._out.token_ids
        return JsonProbe(ids[:begin], ids[begin:], schema, expected)

    def _small_talk(self) -> None:
        for _ in range(self._rng.choice((0, 1, 2))):
            if self._rng.random() < 0.5:
                self._state(1)
            else:
                self._filler(16, 80)

    def _begin(self, tools: Sequence[Tool] | None = None) -> None:
        rng = self._rng
        self._out = Transcript(self._tokenizer)
        self._facts: list[Known] = []
        self._tools = tools if tools is not None else declare(rng) if rng.random() < 0.3 else ()
        if rng.random() < 0.5:
            self._out.message("system", [(rng.choice(SYSTEM), PLAIN)])
        if self._tools:
            self._out.message("system", [(declaration(self._tools), PLAIN)], content="xml", author="tool_declare")
        if rng.random() < 0.3:
            self._out.message("system", [(f"Thinking effort level: {rng.choice(EFFORTS)}", PLAIN)])

    def _since(self, fact: Known) -> int:
        return len(self._out.token_ids) - fact.stated_at

    def _new_fact(self) -> Known:
        rng, taken = self._rng, {f.subject.key for f in self._facts}
        while True:
            found = subject(rng, self._split)
            similar = [f.subject for f in self._facts if f.subject.kind == "thing"]
            if found.kind == "thing" and similar and rng.random() < 0.35:
                found = self._confusable(found, rng.choice(similar))
            if found.key not in taken:
                return Known(found, found.make(rng))

    def _confusable(self, found: Subject, like: Subject) -> Subject:
        """The attribute of a known fact elsewhere, or another attribute of the thing it is about."""
        attribute, _, name = like.key.partition(" of the ")
        if self._rng.random() < 0.5:
            return Subject("thing", f"{attribute} of the {thing(self._rng, self._split)}", like.make)
        return Subject("thing", f"{found.key.partition(' of the ')[0]} of the {name}", found.make)

    def _state(self, count: int) -> Known:
        """State facts, one message each; the last of them."""
        for _ in range(count):
            fact = self._new_fact()
            self._facts.append(fact)
            self._tell(fact, PHRASES[self._split][fact.subject.kind].state)
        self._reply(ACKNOWLEDGED)
        return fact

    def _correct(self, fact: Known) -> None:
        old = fact.value
        while fact.value == old:
            fact.value = fact.subject.make(self._rng)
        fact.num_corrections += 1
        self._tell(fact, PHRASES[self._split][fact.subject.kind].correct)
        self._reply(ACKNOWLEDGED)

    def _tell(self, fact: Known, templates: Sequence[str]) -> None:
        fact.stated_at = self._out.message("user", fact.fill(self._rng.choice(templates), STATED))

    def _reply(self, texts: Sequence[str]) -> None:
        self._out.message("model", [(self._rng.choice(texts), PLAIN)])
        self._out.end_turn()

    def _ask_something(self) -> None:
        """Ask for what was asked least and stated longest ago, or for anything."""
        open_facts = [f for f in self._facts if f.num_asked < 3]
        if open_facts:
            oldest = min(open_facts, key=lambda f: (f.num_asked, f.stated_at))
            self._ask(oldest if self._rng.random() < 0.5 else self._rng.choice(open_facts))

    def _ask(self, fact: Known) -> int:
        """Ask and answer; where the reply begins, right behind `<|message_model|>`."""
        kind = fact.subject.kind
        self._out.message("user", fact.fill(self._rng.choice(PHRASES[self._split][kind].ask), PLAIN))
        begin = len(self._out.token_ids) + 1
        self._out.message("model", fact.fill(ANSWERS[kind], ANSWER))
        self._out.end_turn()
        fact.num_asked += 1
        return begin

    def _exotic(self) -> None:
        if self._tools and self._rng.random() < 0.6:
            self._out.use_tool(tool_use(self._rng, self._tools))
        elif self._rng.random() < 0.5:
            self._ask_for_object()
        else:
            self._ask_json()

    def _ask_for_object(self) -> tuple[Mapping[str, Any], Mapping[str, Any], int]:  # Any: JSON
        """Ask for an object that fits a schema and answer; the schema, the object, and where the reply begins."""
        task = json_task(self._rng, self._split)
        self._out.message("user", [(task.question, PLAIN)])
        begin = len(self._out.token_ids) + 1
        self._answer_json(task.expected)
        return task.schema, task.expected, begin

    def _ask_json(self) -> None:
        """Ask for up to three facts as one JSON object."""
        facts = self._rng.sample(self._facts, min(len(self._facts), self._rng.choice((1, 2, 3))))
        keys = ", ".join(f'"{f.subject.key}"' for f in facts)
        self._out.message("user", [(f"Answer in JSON with the keys {keys}.", PLAIN)])
        self._answer_json({f.subject.key: f.value for f in facts})

    def _answer_json(self, value: Mapping[str, Scalar]) -> None:
        self._out.message("model", object_pieces(value))
        self._out.end_turn()

    def _filler(self, low: int, high: int) -> None:
        """Talk about code or anything else for a while."""
        rng = self._rng
        if rng.random() < 0.55:
            self._show_code(rng.randrange(low, high))
            return
        self._out.message("user", [(" ".join(rng.choice(self._prose) for _ in range(rng.choice((1, 1, 2, 3)))), PLAIN)])
        self._reply(ACKNOWLEDGED if rng.random() < 0.6 else [rng.choice(self._prose)])

    def _show_code(self, length: int) -> None:
        begin = self._rng.randrange(max(1, len(self._code) - length))
        snippet = [int(i) for i in self._code[begin : begin + length]]
        self._out.code("user", self._rng.choice(SHOW_CODE), snippet)
        self._reply(SEEN_CODE)


def talk(seed: int, prose: Sequence[str]) -> str:
    """Text with the vocabulary of training dialogues, for training a tokenizer."""
    rng = random.Random(f"talk {seed}")
    lines = []
    for _ in range(30):
        found = subject(rng, "train")
        fact = Known(found, found.make(rng))
        phrases = PHRASES["train"][found.kind]
        templates = (phrases.state, phrases.correct, phrases.ask, (ANSWERS[found.kind],))
        lines += ["".join(text for text, _ in fact.fill(rng.choice(choices), PLAIN)) for choices in templates]
        tools = declare(rng)
        text, use, task = declaration(tools), tool_use(rng, tools), json_task(rng, "train")
        lines += [rng.choice((*ACKNOWLEDGED, *SHOW_CODE, *SEEN_CODE, *SYSTEM)), use.question, use.call, use.answer]
        lines += [task.question, json.dumps(task.expected)]
        lines += [text, rng.choice(prose)] if prose else [text]
    return "\n".join(lines)

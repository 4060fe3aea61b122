"""Seeded training dialogues and recall probes in Inkling's message format.

Facts are stated, corrected several times and asked for much later, among code, prose, tool calls and JSON answers. Probes use
names and sentences that no training dialogue has. Knows a tokenizer, no model.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from samebit.core.errors import ConfigError
from samebit.train.facts import Known
from samebit.train.fields import Scalar
from samebit.train.forms import capital
from samebit.train.json_answers import JsonTask, json_task, object_pieces, task_about
from samebit.train.noise import OPENINGS, REMARKS
from samebit.train.phrases import (
    ACKNOWLEDGED,
    ANSWERS,
    ASK_JSON,
    COMPLETE_CODE,
    EFFORTS,
    SEEN_CODE,
    SHOW_CODE,
    SYSTEM,
    TALK,
)
from samebit.train.sentences import correction, opening, question, statement
from samebit.train.snippets import Snippets
from samebit.train.tokens import TokenStream
from samebit.train.tools import Tool, declaration, declare, tool_use
from samebit.train.transcript import ANSWER, PLAIN, STATED, WORDING, Transcript
from samebit.train.words import Split, Subject, subject, thing

_SHORT = 1024
# How often each kind of turn comes, in short dialogues and in long ones. What cannot come now is small talk instead.
_SHORT_SHARES = {"state": 18, "correct": 30, "ask": 36, "tool": 60, "json": 3, "object": 7, "complete": 4, "talk": 6}
_LONG_SHARES = {"state": 12, "correct": 34, "ask": 50, "tool": 36, "json": 2, "object": 7, "complete": 4, "talk": 12}
# How many facts there may be; with few of them each is corrected more often.
_SHORT_FACTS, _LONG_FACTS = (2, 3, 5, 10), (6, 12, 24, 40)
# How often a dialogue has tools.
_TOOLS_SHARE, _SHORT_TOOLS_SHARE = 0.55, 0.8
# How often what is told or asked has a sentence from a docstring beside it.
_PROSE_SHARE = 0.06
# How often a new fact, or one that is asked for, is easily confused with another one.
_CONFUSABLE_SHARE = 0.45
# How often a fact will be corrected: two in three are.
_CORRECTIONS = (0, 0, 0, 1, 2, 3, 3, 4, 5)


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
        self._snippets = Snippets(tokenizer, code)
        self._begin()

    def dialogue(self, length: int) -> tuple[list[int], list[int]]:
        """Exactly `length` token ids and their classes; the end is cut where it comes."""
        rng = self._rng
        is_short = length <= _SHORT
        share = _SHORT_TOOLS_SHARE if is_short else _TOOLS_SHARE
        self._begin(most_tools=2 if length < _SHORT else 4, tools_share=share)
        most_facts = rng.choice(_SHORT_FACTS if is_short else _LONG_FACTS)
        actions, shares = zip(*(_SHORT_SHARES if is_short else _LONG_SHARES).items(), strict=True)
        for _ in range(1 if is_short else rng.choice((1, 2, 3))):
            self._state(rng.choice((1, 2)))
        while len(self._out.token_ids) < length:
            action = rng.choices(actions, shares)[0]
            if action == "state" and len(self._facts) < most_facts:
                self._state(rng.choice((1, 1, 2, 3)))
            elif action == "correct":
                self._correct_something()
            elif action == "ask":
                self._ask_something()
            elif action == "tool" and self._tools:
                self._out.use_tool(tool_use(rng, self._tools))
            elif action == "json":
                self._ask_json()
            elif action == "object":
                self._ask_for_object()
            elif action == "complete":
                self._complete_code()
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
        task, begin = self._ask_for_object()
        ids = self._out.token_ids
        return JsonProbe(ids[:begin], ids[begin:], task.schema, task.expected)

    def _small_talk(self) -> None:
        for _ in range(self._rng.choice((0, 1, 2))):
            if self._rng.random() < 0.5:
                self._state(1)
            else:
                self._filler(16, 80)

    def _begin(
        self, tools: Sequence[Tool] | None = None, most_tools: int = 4, tools_share: float = _TOOLS_SHARE
    ) -> None:
        rng = self._rng
        self._out = Transcript(self._tokenizer)
        self._facts: list[Known] = []
        if tools is None:
            tools = declare(rng, self._split, most_tools) if rng.random() < tools_share else ()
        self._tools = tools
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
            if found.kind == "thing" and similar and rng.random() < _CONFUSABLE_SHARE:
                found = self._confusable(found, rng.choice(similar))
            if found.key not in taken:
                return Known(found, found.make(rng), corrections_left=rng.choice(_CORRECTIONS))

    def _confusable(self, found: Subject, like: Subject) -> Subject:
        """The attribute of a known fact elsewhere, or another attribute of the thing it is about."""
        if self._rng.random() < 0.5:
            return Subject("thing", f"{like.attribute} of the {thing(self._rng, self._split)}", like.make)
        return Subject("thing", f"{found.attribute} of the {like.thing}", found.make)

    def _state(self, count: int) -> Known:
        """State facts, one message each; the last of them."""
        for _ in range(count):
            fact = self._new_fact()
            self._facts.append(fact)
            self._tell(fact, statement(self._rng, self._split, fact.subject.kind))
        self._reply(ACKNOWLEDGED)
        return fact

    def _correct_something(self) -> None:
        """Correct a fact that will change: often the one that changed last."""
        changing = [f for f in self._facts if f.corrections_left > 0]
        if changing:
            latest = max(changing, key=lambda f: (f.num_corrections > 0, f.stated_at))
            self._correct(latest if self._rng.random() < 0.4 else self._rng.choice(changing))

    def _correct(self, fact: Known) -> None:
        value = fact.value
        while value == fact.value:
            value = fact.subject.make(self._rng)
        fact.change(value)
        self._tell(fact, correction(self._rng, self._split, fact.subject.kind))
        self._reply(ACKNOWLEDGED)

    def _tell(self, fact: Known, sentence: str) -> None:
        fact.stated_at = self._out.message("user", fact.fill(self._in_prose(sentence), STATED))

    def _in_prose(self, sentence: str) -> str:
        """The sentence of a training dialogue, at times with one from a docstring before or behind it."""
        if self._split == "probe" or self._rng.random() > _PROSE_SHARE:
            return sentence
        prose = self._rng.choice(self._prose)
        return f"{prose} {sentence}" if self._rng.random() < 0.5 else f"{sentence} {prose}"

    def _reply(self, texts: Sequence[str]) -> None:
        self._out.message("model", [(self._rng.choice(texts), PLAIN)])
        self._out.end_turn()

    def _ask_something(self) -> None:
        """Ask for what was asked least and stated longest ago, for what was corrected, for what is easily confused, or for anything."""
        open_facts = [f for f in self._facts if f.num_asked < 3]
        if open_facts:
            draw = self._rng.random()
            if draw < 0.35:
                preferred = [min(open_facts, key=lambda f: (f.num_asked, f.stated_at))]
            elif draw < 0.65:
                preferred = [f for f in open_facts if f.num_corrections]
            elif draw < 0.85:
                things = Counter(f.subject.thing for f in self._facts if f.subject.thing)
                preferred = [f for f in open_facts if things[f.subject.thing] > 1]
            else:
                preferred = []
            self._ask(self._rng.choice(preferred or open_facts))

    def _ask(self, fact: Known) -> int:
        """Ask and answer; where the reply begins, right behind `<|message_model|>`."""
        kind = fact.subject.kind
        asked = self._in_prose(question(self._rng, self._split, kind))
        self._out.message("user", fact.fill(asked, PLAIN))
        begin = len(self._out.token_ids) + 1
        self._out.message("model", fact.fill(ANSWERS[kind], ANSWER))
        self._out.end_turn()
        fact.num_asked += 1
        return begin

    def _complete_code(self) -> None:
        """Show the head of a function and write the rest; it ends where the function does."""
        found = self._snippets.draw(self._rng)
        if found is None:
            self._filler(16, 80)
            return
        shown, wish = f"```python\n{found.head}\n```", self._rng.choice(COMPLETE_CODE)
        question = f"{wish}\n{shown}" if self._rng.random() < 0.7 else f"{shown}\n{wish}"
        self._out.message("user", [(question, PLAIN)])
        self._out.message("model", [("```python", WORDING), ("\n" + found.rest, PLAIN), ("\n```", WORDING)])
        self._out.end_turn()

    def _ask_for_object(self) -> tuple[JsonTask, int]:
        """Ask for an object that fits a schema and answer; the task, and where the reply begins."""
        things = sorted({f.subject.thing for f in self._facts if f.subject.thing})
        if things and self._rng.random() < 0.35:
            name = self._rng.choice(things)
            known = {f.subject.attribute: f.value for f in self._facts if f.subject.thing == name}
            task = task_about(self._rng, self._split, name, known)
        else:
            task = json_task(self._rng, self._split)
        self._out.message("user", [(task.question, PLAIN)])
        begin = len(self._out.token_ids) + 1
        self._answer_json(task.expected)
        return task, begin

    def _ask_json(self) -> None:
        """Ask for up to three facts as one JSON object."""
        facts = self._rng.sample(self._facts, min(len(self._facts), self._rng.choice((1, 2, 3))))
        keys = ", ".join(f'"{f.subject.key}"' for f in facts)
        self._out.message("user", [(ASK_JSON.draw(self._rng).replace("{x}", keys), PLAIN)])
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
        if rng.random() < 0.3:
            said = self._remark()
        else:
            said = " ".join(rng.choice(self._prose) for _ in range(rng.choice((1, 1, 2, 3))))
        self._out.message("user", [(said, PLAIN)])
        self._reply(ACKNOWLEDGED)

    def _remark(self) -> str:
        if self._split == "probe" or self._rng.random() < 0.3:
            return self._rng.choice(TALK)
        return opening(self._rng) + capital(REMARKS.draw(self._rng))

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
        fact = Known(found, found.make(rng), old_value=found.make(rng))
        sentences = [draw(rng, "train", found.kind) for draw in (statement, correction, question)]
        lines += ["".join(text for text, _ in fact.fill(s, PLAIN)) for s in (*sentences, ANSWERS[found.kind])]
        tools = declare(rng)
        text, use, task = declaration(tools), tool_use(rng, tools), json_task(rng, "train")
        lines += [
            rng.choice((*ACKNOWLEDGED, *SHOW_CODE, *SEEN_CODE, *COMPLETE_CODE, *OPENINGS, *TALK, *SYSTEM)),
            use.question,
            use.call,
            use.answer,
        ]
        lines += [task.question, json.dumps(task.expected)]
        lines += [text, rng.choice(prose)] if prose else [text]
    return "\n".join(lines)

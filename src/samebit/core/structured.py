"""What the text of an answer must be, and which tools it may call: plain values with the names of vLLM's offline API.

Knows no grammar library: whether a schema, pattern or grammar can be followed is found out where requests are taken on.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

from samebit.core.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 1 << 18
MAX_CHOICES = 4096
MAX_TOOLS = 128
# What the compiler of grammars, and who follows one, take in by calling themselves: each level of these costs stack.
MAX_LEVELS = 100
MAX_REFERENCES = 500
MAX_RULES = 1000
MAX_NAME_CHARS = 64

_RULE_OR_BRACKET = re.compile(r"^[^\n:(\[]*:|[(\[]", re.MULTILINE)
# In a schema within a grammar; a letter of the word may be written as an escape.
_REFERENCE = re.compile(r'"\$ref"|\\u00(?:24|72|65|66)')
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class ToolShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that an answer may call: its name, and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] = {}  # Any: a JSON schema


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of: `json`, a JSON schema (or its text); `json_object`, any JSON object; `regex`, which the whole text matches;
    `choice`, one of these texts; `grammar`, in llguidance's dialect of Lark, or in GBNF.

    `tools` may be called beside or instead of such a text, in the message format of Inkling's models only: their names and
    arguments are then right. `must_call`: the answer is a call and no text. `may_call_again` False: one call at most.
    `field`: what messages about mistakes call these settings.
    """

    json: str | dict[str, Any] | None = None  # Any: a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    tools: list[ToolShape] = []
    must_call: bool = False
    may_call_again: bool = True
    field: str = "structured_outputs"

    @property
    def kind(self) -> str | None:
        """Which field says what the text is; None where only calls are held to a form."""
        return next((name for name in _KINDS if getattr(self, name) not in (None, False)), None)

    def schema(self) -> dict[str, Any] | None:  # Any: a JSON schema
        """That of `json`; None if there is none. Raises InvalidRequestError for a text that holds none."""
        if not isinstance(self.json, str):
            return self.json
        try:
            schema = json.loads(self.json)
        except RecursionError:
            self._refuse(f"json: is nested too deeply: at most {MAX_LEVELS} levels are allowed")
        except ValueError as error:
            self._refuse(f"json: not a JSON text: {error}")
        if not isinstance(schema, dict):
            self._refuse("json: must be an object")
        return schema

    def validate(self) -> None:
        """Raise InvalidRequestError for what asks for nothing, for two things at once, or for too much."""
        named = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(named) > 1:
            self._refuse(f"{' and '.join(named)} cannot be had together; send one")
        if not named and not self.tools:
            self._refuse(f"needs one of {', '.join(_KINDS)}")
        if self.must_call and (named or not self.tools):
            self._refuse("must_call needs tools, and nothing that a text must be")
        if self.choice is not None and not 1 <= len(self.choice) <= MAX_CHOICES:
            self._refuse(f"choice has {len(self.choice)} texts; must be 1 to {MAX_CHOICES}")
        if len(self.tools) > MAX_TOOLS:
            self._refuse(f"{len(self.tools)} tools: at most {MAX_TOOLS} are allowed")
        names = [tool.name for tool in self.tools]
        for name in names:
            if not 1 <= len(name) <= MAX_NAME_CHARS or names.count(name) > 1:
                self._refuse(
                    f"tool {name[:MAX_NAME_CHARS]!r}: names are different, and of 1 to {MAX_NAME_CHARS} characters"
                )
        self._check_size()
        schema = self.schema()
        if schema is not None:
            self._check_schema("json", schema)
        for tool in self.tools:
            self._check_schema(f"parameters of tool {tool.name!r}", tool.parameters)
        if self.grammar is not None:
            self._check_rules(self.grammar)

    def _check_schema(self, name: str, schema: dict[str, Any]) -> None:  # Any: a JSON schema
        """Raise for one that is nested too deeply, by itself or by references."""
        references = set()
        pending: list[tuple[Any, int]] = [(schema, 1)]  # Any: JSON
        while pending:
            value, level = pending.pop()
            if level > MAX_LEVELS:
                self._refuse(f"{name}: is nested too deeply: at most {MAX_LEVELS} levels are allowed")
            if isinstance(value, dict) and "$ref" in value:
                references.add(str(value["$ref"]))
            inner = value.values() if isinstance(value, dict) else value
            pending += [(item, level + 1) for item in inner if isinstance(item, dict | list)]
        if len(references) > MAX_REFERENCES:
            self._refuse(f"{name}: {len(references)} different references: at most {MAX_REFERENCES} are allowed")

    def _check_rules(self, grammar: str) -> None:
        """Raise for more rules, brackets and references than may lead into each other."""
        num_rules = len(_RULE_OR_BRACKET.findall(grammar))
        if num_rules > MAX_RULES:
            self._refuse(f"grammar: {num_rules} rules and opening brackets: at most {MAX_RULES} are allowed")
        num_references = len(_REFERENCE.findall(grammar))
        if num_references > MAX_REFERENCES:
            self._refuse(f"grammar: {num_references} references: at most {MAX_REFERENCES} are allowed")

    def _check_size(self) -> None:
        try:
            msgspec.msgpack.encode(self)
            size = len(msgspec.json.encode(self))
        except OverflowError:
            self._refuse("holds a whole number that does not fit into 64 bits")
        except (RecursionError, UnicodeEncodeError):
            self._refuse("is nested too deeply, or holds half of a surrogate pair")
        if size > MAX_GRAMMAR_BYTES:
            self._refuse(f"{size} bytes of JSON: at most {MAX_GRAMMAR_BYTES} are allowed")

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidRequestError(f"{self.field}: {reason}", param=self.field)

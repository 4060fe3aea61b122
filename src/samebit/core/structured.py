"""What the text of an answer must be, and which tools it may call: plain values with the names of vLLM's offline API.

Knows no grammar library: whether a schema, pattern or grammar can be followed is found out where requests are taken on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from samebit.core.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 1 << 18
MAX_CHOICES = 4096
MAX_TOOLS = 256
MAX_NAME_CHARS = 64

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

    def _check_size(self) -> None:
        try:
            size = len(msgspec.json.encode(self))
        except (RecursionError, UnicodeEncodeError):
            self._refuse("is nested too deeply, or holds half of a surrogate pair")
        if size > MAX_GRAMMAR_BYTES:
            self._refuse(f"{size} bytes of JSON: at most {MAX_GRAMMAR_BYTES} are allowed")

    def _refuse(self, reason: str) -> None:
        raise InvalidRequestError(f"{self.field}: {reason}", param=self.field)

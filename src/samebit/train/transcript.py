"""A dialogue as token ids in Inkling's message format, with the class of each token. Knows a tokenizer, no facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from samebit.train.tokens import DOCUMENT_START, SPECIAL_TOKENS
from samebit.train.tools import ToolUse

# Classes of tokens, which weigh differently in the loss. An answer's value can be known, and the wording around it too; a value
# that is told cannot be guessed; a repetition shall not be learnt (COPIED), still less one that goes on (LOOPING), but how
# to leave it (LEAVING).
PLAIN, ANSWER, STATED, WORDING, COPIED, LEAVING, LOOPING = range(7)

Pieces = Sequence[tuple[str, int]]


@dataclass(slots=True)
class Transcript:
    """Token ids of a dialogue and the class of each."""

    tokenizer: Tokenizer
    token_ids: list[int] = field(default_factory=lambda: [DOCUMENT_START])
    classes: list[int] = field(default_factory=lambda: [PLAIN])

    def message(self, role: str, body: Pieces, *, content: str = "text", author: str = "") -> int:
        """Add a message; where the first token of its body that is not plain lies (its end, if there is none)."""
        self.mark(f"message_{role}")
        self.text(author, ANSWER if role == "model" else PLAIN)
        self.mark(f"content_{content}")
        begin = len(self.classes)
        for text, token_class in body:
            self.text(text, token_class)
        marked = (i for i in range(begin, len(self.classes)) if self.classes[i] != PLAIN)
        found = next(marked, len(self.classes))
        self.mark("end_message")
        return found

    def code(self, role: str, opening: str, token_ids: Sequence[int]) -> None:
        """Add a message that shows source code given as tokens."""
        self.mark(f"message_{role}", "content_text")
        self.text(f"{opening}\n```python\n", PLAIN)
        self._extend([i for i in token_ids if i >= len(SPECIAL_TOKENS)], PLAIN)
        self.text("\n```", PLAIN)
        self.mark("end_message")

    def call(self, use: ToolUse) -> None:
        """Add the model's call of a tool."""
        self.message("model", [(use.call, ANSWER)], content="invoke_tool_json", author=use.name)
        self.end_turn()

    def use_tool(self, use: ToolUse) -> None:
        """Add a question, the model's call, the tool's result and the answer."""
        self.message("user", [(use.question, PLAIN)])
        self.call(use)
        self.message("tool", [(use.result, PLAIN)], author=use.name)
        self.message("model", [(use.answer, ANSWER)])
        self.end_turn()

    def end_turn(self) -> None:
        """The model stops here."""
        self.mark("content_model_end_sampling")

    def text(self, text: str, token_class: int) -> None:
        """Add text as it is, encoded apart from what stands before it."""
        if text:
            self._extend(self.tokenizer.encode(text, add_special_tokens=False).ids, token_class)

    def mark(self, *names: str) -> None:
        """Add message tokens."""
        self._extend([SPECIAL_TOKENS.index(f"<|{name}|>") for name in names], PLAIN)

    def _extend(self, token_ids: Sequence[int], token_class: int) -> None:
        self.token_ids += token_ids
        self.classes += [token_class] * len(token_ids)

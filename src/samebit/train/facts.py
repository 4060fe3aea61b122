"""What a dialogue has told so far, and how a sentence about it is split into classes. Knows sentences, no tokens."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.train.transcript import ANSWER, PLAIN, WORDING, Pieces
from samebit.train.words import Subject


@dataclass(slots=True)
class Known:
    """A fact of the dialogue so far. `stated_at`: where its present value begins, in tokens; `num_asked`: since it was stated;
    `corrections_left`: how often it will still change.
    """

    subject: Subject
    value: str
    old_value: str = ""
    stated_at: int = 0
    num_corrections: int = 0
    num_asked: int = 0
    corrections_left: int = 0

    def fill(self, template: str, token_class: int) -> Pieces:
        """The sentence in pieces; the value's has `token_class`, and in an answer the full stop belongs to it."""
        before, mark, after = self.subject.filled(template).replace("{old}", self.old_value).partition("{v}")
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

    def change(self, value: str) -> None:
        """The fact has another value from now on, which nobody has asked for yet."""
        self.old_value, self.value = self.value, value
        self.num_corrections += 1
        self.corrections_left -= 1
        self.num_asked = 0

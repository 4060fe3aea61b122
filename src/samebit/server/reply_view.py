"""A reply as its client wants to see it: thinking apart or in the content, and logprobs of the content. Knows jobs, no shapes."""

from collections import deque

from samebit.core.reply import ReplyPiece, joined
from samebit.core.request import EngineOutput, TokenLogprobs
from samebit.server.translate import Job


class ReplyView:
    """Owner of what one reply has told but its client not yet heard; outputs must come in order."""

    def __init__(self, job: Job, index: int) -> None:
        """`index`: of the choice."""
        self._job = job
        self._request = job.requests[index]
        self._thought = ""
        # Tokens come before it is known what they are for.
        self._unclaimed: deque[TokenLogprobs] = deque()
        self.num_calls = 0
        self._has_content = False

    def pieces(self, output: EngineOutput) -> list[ReplyPiece]:
        """What the client hears after one more output."""
        pieces = output.pieces or ([ReplyPiece("content", output.text)] if output.text else [])
        told = []
        for piece in pieces:
            if piece.kind != "reasoning":
                told += [*self._take_thought(), piece]
            elif self._job.separates_reasoning:
                self._thought += piece.text
                told += self._take_thought() if self._job.streams_reasoning else []
            else:
                told.append(ReplyPiece("content", piece.text))
            self.num_calls = max(self.num_calls, piece.call_index + 1)
            self._has_content |= any(item.kind == "content" for item in told[-1:])
        if output.finish_reason is not None:
            told += self._take_thought()
        return joined(told)

    @property
    def is_silent(self) -> bool:
        """Whether the reply so far has neither content nor a call: an answer of this kind has an empty text, and no other one has."""
        return not (self._has_content or self.num_calls)

    def logprobs(self, output: EngineOutput) -> list[TokenLogprobs]:
        """Logprobs of content that are known after one more output."""
        if not self._request.wants_pieces:
            return output.logprobs
        self._unclaimed += output.logprobs
        shown = ("content",) if self._job.separates_reasoning else ("content", "reasoning")
        count = min(len(self._unclaimed), len(output.token_kinds))
        known = [self._unclaimed.popleft() for _ in range(count)]
        return [item for item, kind in zip(known, output.token_kinds, strict=False) if kind in shown]

    def call_id(self, call_index: int) -> str:
        """The id of a call, the same whether the answer is streamed or not."""
        return f"call_{self._request.request_id.partition('-')[2]}_{call_index}"

    def _take_thought(self) -> list[ReplyPiece]:
        thought, self._thought = self._thought, ""
        return [ReplyPiece("reasoning", thought)] if thought else []

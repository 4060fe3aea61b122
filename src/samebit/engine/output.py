"""Turns tokens into text for every open request and finds stop strings. Knows no scheduler and no device."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from samebit.core.reply import MessageFormat
from samebit.core.request import EngineOutput, FinishReason, Request
from samebit.engine.detokenizer import IncrementalDetokenizer, StopAutomaton
from samebit.engine.reply_parser import ReplyParser
from samebit.engine.tokenizer import Tokenizer
from samebit.scheduler.sequence import Progress


@dataclass(slots=True)
class _OpenRequest:
    """`parser` takes the answer apart, if that is wanted; else all of it goes through the detokenizer."""

    request: Request
    detokenizer: IncrementalDetokenizer
    parser: ReplyParser | None

    def push(self, token_id: int) -> str:
        """Take a token; return the text of a request without a parser."""
        if self.parser is None:
            return self.detokenizer.push(token_id)
        self.parser.push(token_id)
        return ""

    def finish(self) -> str:
        """There are no more tokens; return as `push`."""
        if self.parser is None:
            return self.detokenizer.finish()
        self.parser.finish()
        return ""

    def has_ended(self) -> bool:
        """Whether its one call is made."""
        if self.parser is None or not self.request.ends_after_call:
            return False
        return self.parser.has_ended_call and self.detokenizer.num_tokens >= self.request.params.min_tokens


class OutputProcessor:
    """Owner of the text side of open requests. Text, token ids and logprobs that it reports always end together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._format = MessageFormat.of(tokenizer.special_tokens())
        self._open: dict[str, _OpenRequest] = {}

    def open(self, request: Request) -> None:
        """Begin a request."""
        params = request.params
        stops = params.stop_strings
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            stop=StopAutomaton(stops) if stops else None,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        parser = None
        if request.wants_pieces and self._format is not None:
            parser = ReplyParser(self._format, self._tokenizer, detokenizer)
            parser.begin(request.prompt_token_ids)
        self._open[request.request_id] = _OpenRequest(request, detokenizer, parser)

    def close(self, request_id: str) -> None:
        """Forget a request that ends without further output."""
        self._open.pop(request_id, None)

    def process(self, progress: Progress) -> EngineOutput:
        """The output of one step for one request. A `finish_reason` that `progress` lacks means: what was said ended it."""
        entry = self._open[progress.request_id]
        detokenizer, params = entry.detokenizer, entry.request.params
        text = ""
        token_ids: list[int] = []
        reason: FinishReason | None = progress.finish_reason
        stop: str | int | None = progress.stop_token_id
        for token in progress.tokens:
            token_ids.append(token.token_id)
            is_stop_token = stop is not None and len(token_ids) == len(progress.tokens)
            if is_stop_token and not params.include_stop_str_in_output:
                continue
            text += entry.push(token.token_id)
            if detokenizer.match is not None:
                break
            if entry.has_ended():
                reason, stop = "stop", stop if is_stop_token else None
                break
        if reason is not None:
            text += entry.finish()
        if detokenizer.match is not None:
            reason, stop = "stop", detokenizer.match.stop_string
        elif stop is not None and stop not in (params.stop_token_ids or ()):
            stop = None  # the model's own end token is no reason of the caller's
        if reason is not None:
            self.close(progress.request_id)
        output = EngineOutput(
            request_id=progress.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=progress.tokens[: len(token_ids)] if params.logprobs is not None else [],
            prompt_logprobs=progress.prompt,
            finish_reason=reason,
            stop_reason=stop,
            error=progress.error,
            error_param=progress.error_param,
            speculation=progress.speculation.within(len(token_ids)),
            num_cached_tokens=progress.num_cached_tokens,
            num_processed_tokens=progress.num_processed_tokens,
            cache_miss_reason=progress.cache_miss_reason,
            num_preemptions=progress.num_preemptions,
        )
        return output if entry.parser is None else _with_pieces(output, entry.parser)


def _with_pieces(output: EngineOutput, parser: ReplyParser) -> EngineOutput:
    """The output of a reply that is taken apart."""
    pieces, kinds = parser.take()
    text = "".join(piece.text for piece in pieces if piece.kind == "content")
    return msgspec.structs.replace(output, text=text, pieces=pieces, token_kinds=kinds)

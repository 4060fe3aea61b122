"""What one sample gained, as a choice of the endpoint that asked. Knows both endpoints' shapes, and nothing of sockets."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from samebit.core.reply import PieceKind, ReplyPiece
from samebit.core.request import EngineOutput
from samebit.engine.streams import merge
from samebit.engine.tokenizer import Tokenizer
from samebit.server.logprob_shapes import LegacyLogprobs, chat_logprobs, join, prompt_logprobs
from samebit.server.reply_view import ReplyView
from samebit.server.response_models import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    Choice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionDelta,
    MessageDelta,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
)
from samebit.server.translate import Job


class Shape(Protocol):
    """How one endpoint shows its answer. Owned by one job; pieces of a choice must come in order."""

    object_name: str
    chunk_object_name: str
    answer_type: type[msgspec.Struct]
    chunk_type: type[msgspec.Struct]

    def opening(self, index: int) -> Choice | None:
        """What a stream says of a choice before anything is known of it."""

    def pieces(self, index: int, output: EngineOutput) -> Sequence[Choice]:
        """What a stream says of one more output, chunk by chunk."""

    def whole(self, index: int, output: EngineOutput) -> Choice:
        """A choice that is complete."""

    def beside_choices(self, output: EngineOutput) -> dict[str, Any]:  # Any: fields of the answer types
        """What a body says once for all choices; `output` is the first one's."""


class ChatShape:
    """Answers of /v1/chat/completions."""

    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"
    answer_type: type[msgspec.Struct] = ChatCompletion
    chunk_type: type[msgspec.Struct] = ChatCompletionChunk

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._views = [ReplyView(job, index) for index in range(len(job.requests))]

    def opening(self, index: int) -> ChatChunkChoice:
        """The role."""
        return ChatChunkChoice(index=index, delta=MessageDelta(role="assistant"))

    def pieces(self, index: int, output: EngineOutput) -> list[ChatChunkChoice]:
        """Reasoning, content and calls as deltas, in the order of the reply. The last chunk tells the tokens."""
        view = self._views[index]
        deltas = [self._delta(view, piece) for piece in view.pieces(output)]
        if output.finish_reason is not None and view.is_silent:
            deltas.append(MessageDelta(content=""))
        logprobs = self._logprobs(view, output)
        has_tokens = bool(output.token_ids) and self._job.wants_token_ids
        speaks = [place for place, delta in enumerate(deltas) if delta.content is not UNSET]
        if not deltas and (has_tokens or output.finish_reason is not None or (logprobs and logprobs.content)):
            deltas = [MessageDelta()]
        with_logprobs = speaks[0] if speaks else len(deltas) - 1
        chunks = [
            ChatChunkChoice(index=index, delta=delta, logprobs=logprobs if place == with_logprobs else None)
            for place, delta in enumerate(deltas)
        ]
        if chunks:
            chunks[-1] = msgspec.structs.replace(
                chunks[-1],
                finish_reason=_finish_reason(view, output),
                stop_reason=output.stop_reason,
                token_ids=_token_ids(self._job, output),
            )
        return chunks

    def whole(self, index: int, output: EngineOutput) -> ChatChoice:
        """The message."""
        view = self._views[index]
        pieces = view.pieces(output)
        return ChatChoice(
            index=index,
            message=self._message(view, pieces, output),
            logprobs=self._logprobs(view, output),
            finish_reason=_finish_reason(view, output),
            stop_reason=output.stop_reason,
            token_ids=_token_ids(self._job, output),
        )

    def beside_choices(self, output: EngineOutput) -> dict[str, Any]:  # Any: fields of the answer types
        """The prompt, where it is wanted: a conversation has one."""
        job = self._job
        return {
            "prompt_token_ids": job.requests[0].prompt_token_ids if job.wants_token_ids else UNSET,
            "prompt_logprobs": _prompt_logprobs(job, self._tokenizer, output),
        }

    def _delta(self, view: ReplyView, piece: ReplyPiece) -> MessageDelta:
        if piece.kind == "content":
            return MessageDelta(content=piece.text)
        if piece.kind == "reasoning":
            return MessageDelta(reasoning_content=piece.text, reasoning=piece.text)
        index = piece.call_index
        if not piece.name:
            return MessageDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(piece.text))])
        begin = FunctionDelta("", piece.name)
        return MessageDelta(
            tool_calls=[ToolCallDelta(index=index, id=view.call_id(index), type="function", function=begin)]
        )

    def _message(self, view: ReplyView, pieces: Sequence[ReplyPiece], output: EngineOutput) -> AnswerMessage:
        def text_of(kind: PieceKind, call_index: int = -1) -> str:
            return "".join(piece.text for piece in pieces if (piece.kind, piece.call_index) == (kind, call_index))

        names = [piece.name for piece in pieces if piece.name]
        calls = [
            ToolCall(view.call_id(index), CalledFunction(name, text_of("call", index)))
            for index, name in enumerate(names)
        ]
        content, reasoning = text_of("content"), text_of("reasoning") or UNSET
        return AnswerMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
            token_ids=_token_ids(self._job, output),
        )

    def _logprobs(self, view: ReplyView, output: EngineOutput) -> ChatLogprobs | None:
        tokens = view.logprobs(output)
        return None if self._job.num_top is None else chat_logprobs(self._tokenizer, tokens)


class CompletionShape:
    """Answers of /v1/completions; with `echo` the prompt comes first."""

    object_name: str = "text_completion"
    chunk_object_name: str = "text_completion"
    answer_type: type[msgspec.Struct] = Completion
    chunk_type: type[msgspec.Struct] = Completion

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._held: dict[int, list[EngineOutput]] = {}
        self._legacy: dict[int, LegacyLogprobs] = {}

    def opening(self, index: int) -> None:
        """Nothing."""

    def pieces(self, index: int, output: EngineOutput) -> list[CompletionChoice]:
        """Text; the prompt, if it is wanted, with the first token."""
        if index in self._legacy:
            return [self._choice(index, output, is_first=False)] if _says_something(self._job, output) else []
        # The logprobs of a long prompt come in parts, before the first token.
        held = self._held.setdefault(index, [])
        held.append(output)
        if not output.token_ids and output.finish_reason is None:
            return []
        return [self.whole(index, merge(self._held.pop(index)))]

    def whole(self, index: int, output: EngineOutput) -> CompletionChoice:
        """Prompt, if wanted, and answer."""
        return self._choice(index, output, is_first=True)

    def beside_choices(self, output: EngineOutput) -> dict[str, Any]:  # Any: fields of the answer types
        """Nothing: each choice has its own prompt."""
        return {}

    def _choice(self, index: int, output: EngineOutput, *, is_first: bool) -> CompletionChoice:
        job, request = self._job, self._job.requests[index]
        if job.is_scoring:
            output = msgspec.structs.replace(output, text="", token_ids=[], logprobs=[], finish_reason="length")
        text = output.text
        prompt_text = ""
        if is_first and job.echo:
            prompt_text = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            text = prompt_text + text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, output, prompt_text, is_first=is_first),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=_token_ids(job, output),
            prompt_token_ids=request.prompt_token_ids if is_first and job.wants_token_ids else UNSET,
            prompt_logprobs=_prompt_logprobs(job, self._tokenizer, output) if is_first else UNSET,
        )

    def _logprobs(
        self, index: int, output: EngineOutput, prompt_text: str, *, is_first: bool
    ) -> CompletionLogprobs | None:
        request = self._job.requests[index]
        if is_first:
            skips = request.params.skip_special_tokens
            self._legacy[index] = LegacyLogprobs(self._tokenizer, skips_special=skips, offset=len(prompt_text))
        if self._job.num_top is None:
            return None
        answer = self._legacy[index].answer(output.logprobs)
        if not (is_first and self._job.echo):
            return answer
        prompt = LegacyLogprobs(self._tokenizer, skips_special=False)
        return join(prompt.prompt(request.prompt_token_ids, output.prompt_logprobs), answer)


def _prompt_logprobs(job: Job, tokenizer: Tokenizer, output: EngineOutput) -> PromptLogprobs | UnsetType:
    return prompt_logprobs(tokenizer, output.prompt_logprobs) if job.wants_prompt_logprobs else UNSET


def _says_something(job: Job, output: EngineOutput) -> bool:
    has_tokens = bool(output.token_ids) and (job.num_top is not None or job.wants_token_ids)
    return bool(output.text) or has_tokens or output.finish_reason is not None


def _token_ids(job: Job, output: EngineOutput) -> list[int] | UnsetType:
    return output.token_ids if job.wants_token_ids else UNSET


def _finish_reason(view: ReplyView, output: EngineOutput) -> ChatFinishReason | None:
    """As the engine says, but that a turn with calls is not over."""
    return "tool_calls" if output.finish_reason == "stop" and view.num_calls else output.finish_reason

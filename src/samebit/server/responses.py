"""Puts outputs together as an answer of /v1/responses: one body, or its typed events. Knows no HTTP and no socket."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import msgspec

from samebit.core.errors import SamebitError
from samebit.core.request import EngineInfo, EngineOutput
from samebit.engine.streams import merge
from samebit.engine.tokenizer import Tokenizer
from samebit.server.answers import Accounts, chain
from samebit.server.errors import describe
from samebit.server.logprob_shapes import chat_logprobs
from samebit.server.reply_view import ReplyView
from samebit.server.response_items import ResponseItems
from samebit.server.responses_body import ResponsesBody
from samebit.server.responses_models import (
    Event,
    IncompleteDetails,
    OutputItem,
    ResponseObject,
    ResponseReasoning,
    ResponseStatus,
    ResponseText,
    ResponseUsage,
)
from samebit.server.translate import Job


class ResponseAnswer:
    """Owner of what is known of one answer so far; its job has one request."""

    def __init__(self, job: Job, body: ResponsesBody, tokenizer: Tokenizer, model: str, info: EngineInfo) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._model = model
        self._fingerprint = info.system_fingerprint
        self._accounts = Accounts(job, info)
        self._view = ReplyView(job, 0)
        self._items = ResponseItems(self._view, job.requests[0].request_id)
        self._num_events = 0

    async def whole(self, outputs: AsyncIterator[EngineOutput]) -> bytes:
        """The body of an answer that is not streamed. Raises what the engine ended the request with."""
        parts = []
        async for output in outputs:
            self._accounts.take(output)
            parts.append(output)
        whole = merge(parts)
        for _ in self._told(whole):
            pass
        return msgspec.json.encode(self._ended(whole))

    async def events(
        self, first: EngineOutput | None, outputs: AsyncIterator[EngineOutput]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; `first`, if any, was taken from `outputs`. An error is an event and the last."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        last = None
        try:
            async for output in chain(first, outputs):
                self._accounts.take(output)
                last = output
                for kind, fields in self._told(output):
                    yield self._event(kind, **fields)
        except SamebitError as error:
            detail = describe(error)[1].error
            said = {"code": detail.code, "message": detail.message, "param": detail.param}
            yield self._event("error", error=detail, **said)
            return
        assert last is not None, "an answer has at least its end"
        response = self._ended(last)
        yield self._event(f"response.{response.status}", response=response)

    def _told(self, output: EngineOutput) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: fields of Event
        """Events of one more output, and of the end."""
        logprobs = self._view.logprobs(output)
        shapes = [] if self._job.num_top is None else chat_logprobs(self._tokenizer, logprobs).content
        yield from self._items.take(self._view.pieces(output), shapes)
        if output.finish_reason is not None:
            yield from self._items.end(_status(output))

    def _ended(self, output: EngineOutput) -> ResponseObject:
        status = _status(output)
        usage = self._accounts.usage()
        return msgspec.structs.replace(
            self._response(status, self._items.done),
            usage=ResponseUsage(
                usage.prompt_tokens,
                usage.prompt_tokens_details,
                usage.completion_tokens,
                usage.completion_tokens_details,
                usage.total_tokens,
            ),
            metrics=self._accounts.metrics(),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        )

    def _response(self, status: ResponseStatus, output: list[OutputItem]) -> ResponseObject:
        body, params = self._body, self._job.requests[0].params
        choice = body.tool_choice or "auto"
        return ResponseObject(
            id=self._job.id,
            created_at=self._job.created,
            status=status,
            model=self._model,
            output=output,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=self._job.num_top or 0,
            reasoning=ResponseReasoning(body.reasoning.effort if body.reasoning else None),
            metadata=body.metadata or {},
            user=body.user,
            seed=self._job.seed,
            system_fingerprint=self._fingerprint,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            text=ResponseText(_format(body)),
        )

    def _event(self, kind: str, **fields: Any) -> bytes:  # Any: fields of Event
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _format(body: ResponsesBody) -> dict[str, Any]:  # Any: JSON, as the client sent it
    wanted = body.text.format if body.text else None
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)


def _status(output: EngineOutput) -> ResponseStatus:
    return "completed" if output.finish_reason == "stop" else "incomplete"

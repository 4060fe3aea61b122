"""Puts outputs together as an answer of /v1/responses: one body, or its typed events. Knows no HTTP and no socket."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from samebit.core.errors import SamebitError
from samebit.core.request import EngineInfo, EngineOutput
from samebit.engine.streams import merge
from samebit.engine.tokenizer import Tokenizer
from samebit.server.answers import Accounts, chain
from samebit.server.errors import describe
from samebit.server.logprob_shapes import chat_logprobs
from samebit.server.response_models import ChatTokenLogprob
from samebit.server.responses_body import ResponsesBody
from samebit.server.responses_models import (
    Event,
    IncompleteDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseObject,
    ResponseReasoning,
    ResponseStatus,
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
        self._item_id = f"msg-{job.requests[0].request_id}"
        self._num_events = 0

    async def whole(self, outputs: AsyncIterator[EngineOutput]) -> bytes:
        """The body of an answer that is not streamed. Raises what the engine ended the request with."""
        parts = []
        async for output in outputs:
            self._accounts.take(output)
            parts.append(output)
        return msgspec.json.encode(self._ended(merge(parts)))

    async def events(
        self, first: EngineOutput | None, outputs: AsyncIterator[EngineOutput]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; `first`, if any, was taken from `outputs`. An error is an event and the last."""
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        nothing = OutputText(text="")
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **part, part=nothing)
        outputs_so_far = []
        try:
            async for output in chain(first, outputs):
                self._accounts.take(output)
                outputs_so_far.append(output)
                if output.text or (output.token_ids and self._job.num_top is not None):
                    logprobs = self._logprobs(output)
                    yield self._event("response.output_text.delta", **part, delta=output.text, logprobs=logprobs)
        except SamebitError as error:
            detail = describe(error)[1].error
            said = {"code": detail.code, "message": detail.message, "param": detail.param}
            yield self._event("error", error=detail, **said)
            return
        whole = merge(outputs_so_far)
        response = self._ended(whole)
        (item,) = response.output
        (content,) = item.content
        yield self._event("response.output_text.done", **part, text=content.text, logprobs=content.logprobs)
        yield self._event("response.content_part.done", **part, part=content)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response.status}", response=response)

    def _ended(self, output: EngineOutput) -> ResponseObject:
        status: ResponseStatus = "completed" if output.finish_reason == "stop" else "incomplete"
        text = OutputText(text=output.text, logprobs=self._logprobs(output))
        usage = self._accounts.usage()
        return msgspec.structs.replace(
            self._response(status, [self._item(status, [text])]),
            usage=ResponseUsage(
                usage.prompt_tokens,
                usage.prompt_tokens_details,
                usage.completion_tokens,
                OutputTokensDetails(),
                usage.total_tokens,
            ),
            metrics=self._accounts.metrics(),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        )

    def _response(self, status: ResponseStatus, output: list[OutputMessage]) -> ResponseObject:
        body, params = self._body, self._job.requests[0].params
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
        )

    def _item(self, status: ResponseStatus, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _logprobs(self, output: EngineOutput) -> list[ChatTokenLogprob]:
        return [] if self._job.num_top is None else chat_logprobs(self._tokenizer, output.logprobs).content

    def _event(self, kind: str, **fields: Any) -> bytes:  # Any: fields of Event
        event = Event(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

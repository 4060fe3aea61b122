"""OpenAI's endpoints: chat, completions, responses, models; and text to tokens and back. Knows no sockets or processes."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from samebit.core.request import EngineOutput
from samebit.engine.streams import OutputStream
from samebit.server.answers import Answer
from samebit.server.openapi import operation
from samebit.server.request_models import ChatBody, CompletionBody, DetokenizeBody, SharedBody, TokenizeBody
from samebit.server.response_models import (
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)
from samebit.server.responses import ResponseAnswer
from samebit.server.responses_body import ResponsesBody
from samebit.server.responses_models import ResponseObject
from samebit.server.sent_names import SentOutputs, in_words_of
from samebit.server.service import Route, Service, json_answer, json_bytes
from samebit.server.shapes import ChatShape, CompletionShape, Shape
from samebit.server.traces import tell_trace
from samebit.server.translate import Job
from samebit.server.transport import EventStream, parse_body, unless_gone


class OpenAIRoutes:
    """Handlers around a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client, self._translator = service.client, service.translator

    def routes(self) -> list[Route]:
        """All endpoints of this module."""
        return [
            Route("POST", "/v1/chat/completions", self.chat, operation(ChatCompletion, ChatBody, is_streamed=True)),
            Route("POST", "/v1/completions", self.complete, operation(Completion, CompletionBody, is_streamed=True)),
            Route("POST", "/v1/responses", self.respond, operation(ResponseObject, ResponsesBody, is_streamed=True)),
            Route("GET", "/v1/models", self.models, operation(ModelList)),
            Route("GET", "/v1/models/{name:path}", self.model, operation(ModelCard)),
            Route("POST", "/tokenize", self.tokenize, operation(Tokenized, TokenizeBody)),
            Route("POST", "/detokenize", self.detokenize, operation(Detokenized, DetokenizeBody)),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_open()
        body = await parse_body(request, ChatBody, self._service.max_body_bytes)
        with in_words_of(body):
            job = await self._translator.chat(body)
        return await self._answer(request, body, job, self._choices(job, ChatShape(job, self._translator.tokenizer)))

    async def complete(self, request: Request) -> Response:
        """Continue one or more prompts."""
        self._service.check_open()
        body = await parse_body(request, CompletionBody, self._service.max_body_bytes)
        # A million prompts are turned away before any of them is encoded; samples of them are counted when `n` is known to be one.
        self._client.check_count(body.num_prompts)
        with in_words_of(body):
            job = await self._translator.complete(body)
        shape = CompletionShape(job, self._translator.tokenizer)
        return await self._answer(request, body, job, self._choices(job, shape))

    async def respond(self, request: Request) -> Response:
        """Answer a conversation in the newer shape. Nothing is kept of it."""
        self._service.check_open()
        body = await parse_body(request, ResponsesBody, self._service.max_body_bytes)
        with in_words_of(body):
            job = await self._translator.respond(body)
        tokenizer, name = self._translator.tokenizer, self._translator.served_name
        return await self._answer(request, body, job, ResponseAnswer(job, body, tokenizer, name, self._client.info))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        body = await parse_body(request, TokenizeBody, self._service.max_body_bytes)
        with in_words_of(body):
            ids = await self._translator.tokenize(body)
        texts = list(map(self._translator.tokenizer.token_text, ids)) if body.return_token_strs else None
        length = self._client.info.max_length
        return json_answer(Tokenized(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await parse_body(request, DetokenizeBody, self._service.max_body_bytes)
        return json_answer(Detokenized(await self._translator.detokenize(body)))

    async def models(self, request: Request) -> Response:
        """List the model."""
        return json_answer(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._translator.check_model(request.path_params["name"])
        return json_answer(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._translator.served_name, created=self._service.started, max_model_len=self._client.info.max_length
        )

    def _choices(self, job: Job, shape: Shape) -> Answer:
        return Answer(job, shape, self._translator.served_name, self._client.info)

    async def _answer(self, request: Request, body: SharedBody, job: Job, answer: Answer | ResponseAnswer) -> Response:
        self._service.check_open()
        tell_trace(request.scope, job, None, self._client.info)
        stream = self._client.submit(job.requests, job.id)
        tell_trace(request.scope, job, stream, self._client.info)
        self._service.traffic.open()
        outputs = SentOutputs(body, stream)
        keeps_open = False
        try:
            if not job.is_stream:
                return json_bytes(await unless_gone(request.receive, answer.whole(outputs)))
            # Not until the first output is it known that the engine took the request: its refusal is still a 400.
            interval_s = self._service.ping_interval_s
            first = await unless_gone(request.receive, _first(outputs, interval_s or None))
            keeps_open = True
            return EventStream(answer.events(first, outputs), lambda: self._end(stream), interval_s)
        finally:
            if not keeps_open:
                self._end(stream)

    def _end(self, stream: OutputStream) -> None:
        stream.close()
        self._service.traffic.close()


async def _first(outputs: AsyncIterator[EngineOutput], wait_s: float | None) -> EngineOutput | None:
    """The first output; None if there is none for so long that the client should hear that it has been heard."""
    try:
        return await asyncio.wait_for(anext(outputs), wait_s)
    except TimeoutError:
        return None

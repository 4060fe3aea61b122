"""OpenAI's endpoints: chat, completions, responses, models; and text to tokens and back. Knows no sockets or processes."""

from starlette.requests import Request
from starlette.responses import Response

from samebit.core.request import EngineOutput
from samebit.engine.streams import OutputStream
from samebit.server.answers import Answer
from samebit.server.openapi import operation
from samebit.server.request_models import ChatBody, CompletionBody
from samebit.server.response_models import ChatCompletion, Completion, ModelCard, ModelList
from samebit.server.service import Route, Service, json_answer, json_bytes
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
            Route("POST", "/v1/chat/completions", self.chat, operation(ChatCompletion, ChatBody)),
            Route("POST", "/v1/completions", self.complete, operation(Completion, CompletionBody)),
            Route("GET", "/v1/models", self.models, operation(ModelList)),
            Route("GET", "/v1/models/{name:path}", self.model, operation(ModelCard)),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_open()
        body = await parse_body(request, ChatBody, self._service.max_body_bytes)
        return await self._answer(request, await self._translator.chat(body), is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Continue one or more prompts."""
        self._service.check_open()
        body = await parse_body(request, CompletionBody, self._service.max_body_bytes)
        # A million prompts are turned away before any of them is encoded.
        self._client.check_count(body.num_prompts * (body.n or 1))
        return await self._answer(request, await self._translator.complete(body), is_chat=False)

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

    async def _answer(self, request: Request, job: Job, *, is_chat: bool) -> Response:
        self._service.check_open()
        answer = Answer(
            job,
            self._translator.tokenizer,
            is_chat=is_chat,
            model=self._translator.served_name,
            fingerprint=self._client.info.system_fingerprint,
        )
        stream = self._client.submit(job.requests)
        self._service.traffic.open()
        keeps_open = False
        try:
            if not job.is_stream:
                return json_bytes(await unless_gone(request.receive, answer.whole(stream)))
            # Not until the first output is it known that the engine took the request: its refusal is still a 400.
            first = await unless_gone(request.receive, _first(stream))
            keeps_open = True
            return EventStream(answer.events(first, stream), lambda: self._end(stream))
        finally:
            if not keeps_open:
                self._end(stream)

    def _end(self, stream: OutputStream) -> None:
        stream.close()
        self._service.traffic.close()


async def _first(stream: OutputStream) -> EngineOutput:
    return await anext(stream)

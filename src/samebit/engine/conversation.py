"""A chat with a model in this process, one turn at a time, as text that comes while it is made.

Knows the engine and the chat template. Does not know terminals or servers.
"""

import random
from collections.abc import Generator, Iterator

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.core.request import EngineOutput, Request, SamplingParams
from samebit.engine.chat_template import load_chat_template
from samebit.engine.engine import Engine
from samebit.engine.kept_turns import Message
from samebit.engine.model_source import read_generation_defaults, resolve_model

_SEED_BITS = 53


class Conversation:
    """Owner of an engine and of what was said. `seed` None draws a new one for every answer."""

    def __init__(self, config: EngineConfig, *, system: str | None = None, seed: int | None = None) -> None:
        """Load the model. Raises ConfigError, ModelError, and InvalidRequestError without a chat template."""
        folder = resolve_model(config.model)
        defaults = read_generation_defaults(folder)
        self._engine = Engine(config)
        self._template = load_chat_template(folder, self._engine.tokenizer)
        if self._template is None:
            raise InvalidRequestError(f"model {config.model!r} has no chat template", param="model")
        self._eos_token_ids = defaults.eos_token_ids
        self.params = SamplingParams(max_tokens=None, **defaults.sampling)
        """How answers are sampled: as the checkpoint recommends."""
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._seed = seed
        self._num_turns = 0
        self.messages: list[Message] = []
        """What was said, of answers also the tokens; assigned anew by `reset`."""
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but for the system message."""
        self.messages = list(self._system)

    def set_params(self, params: SamplingParams) -> None:
        """Sample later answers as `params` say. Raises InvalidRequestError."""
        params.validate()
        self.params = params

    def say(self, text: str) -> Generator[str, None, None]:
        """Say `text` and yield the answer as it comes; an answer that is broken off counts as far as it came.

        Raises InvalidRequestError, after which it is as if nothing had been said, and StepError.
        """
        assert self._template is not None, "checked at the start"
        asked = [*self.messages, {"role": "user", "content": text}]
        self._num_turns += 1
        request = Request(
            request_id=str(self._num_turns),
            prompt_token_ids=self._template.render(asked),
            params=msgspec.structs.replace(self.params, n=1),
            seed=random.SystemRandom().getrandbits(_SEED_BITS) if self._seed is None else self._seed,
            eos_token_ids=self._eos_token_ids,
        )
        self._engine.add(request)
        answer, token_ids = "", list[int]()
        try:
            for output in self._outputs():
                answer += output.text
                token_ids += output.token_ids
                if output.text:
                    yield output.text
        finally:
            self._engine.abort(request.request_id)
            self.messages = [*asked, {"role": "assistant", "content": answer, "token_ids": token_ids}]

    def _outputs(self) -> Iterator[EngineOutput]:
        while self._engine.has_work:
            for output in self._engine.step():
                output.check()
                yield output
                if output.finish_reason is not None:
                    return

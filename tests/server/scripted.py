"""An engine that says what it is told to: the reply is spelled in the last message of the user, control tokens and all.

It comes in steps of `seed % 7 + 1` tokens, through the engine's own text side.
"""

import re
import time

import msgspec

from samebit.core.request import TokenLogprobs
from samebit.engine.model_source import resolve_model
from samebit.engine.output import OutputProcessor
from samebit.engine.tokenizer import Tokenizer
from samebit.scheduler.sequence import Progress
from tests.server.fakes import FakeEngine

SAID = re.compile(r"<\|message_user\|><\|content_text\|>(.*?)<\|end_message\|><\|message_model\|>", re.DOTALL)


class ScriptedEngine(FakeEngine):
    def __init__(self, config):
        super().__init__(config)
        self._tokenizer = Tokenizer(resolve_model("nano"))
        self._outputs = OutputProcessor(self._tokenizer)
        self.info = msgspec.structs.replace(self.info, vocab_size=self._tokenizer.vocab_size)

    def is_prepared(self, request):
        return True

    def prepare(self, request):
        pass

    def add(self, request):
        request.params.validate()
        shown = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        said = SAID.findall(shown)[-1].replace("[[", "<|").replace("]]", "|>")
        ids = [i for i in self._tokenizer.encode(said, allow_special=True) if i not in request.banned_token_ids]
        self._requests[request.request_id] = (request, ids[: request.params.max_tokens])
        self._outputs.open(request)

    def abort(self, request_id):
        self._outputs.close(request_id)
        return self._requests.pop(request_id, None) is not None

    def step(self):
        outputs = [self._say(*entry) for entry in list(self._requests.values())]
        time.sleep(0.001)
        return outputs

    def _say(self, request, ids):
        size = request.seed % 7 + 1
        now, later = ids[:size], ids[size:]
        self._requests[request.request_id] = (request, later)
        is_stop = bool(now) and now[-1] in request.eos_token_ids and not later
        progress = Progress(
            request_id=request.request_id,
            tokens=[TokenLogprobs(i, -0.5, 1, [i], [-0.5]) for i in now],
            finish_reason=None if later else "stop" if is_stop else "length",
            stop_token_id=now[-1] if is_stop else None,
        )
        output = self._outputs.process(progress)
        if output.finish_reason is not None:
            del self._requests[request.request_id]
        return output

"""An engine without a model: answers at once, by rules that tests can know.

The n-th token of an answer is (sum of the prompt + seed + sample + n) modulo 256, shown as one byte
of text. A prompt that begins with token 255 kills the process, 254 fails its step, 253 never ends. Weights whose name has
"later" in it are loaded once a file of that name is there, and those whose name ends in "cursed" are refused. A regex is
compiled once a file of that name is there; "bad" is none.
"""

import os
import time
from pathlib import Path

import msgspec

from samebit.core.errors import InvalidRequestError, ModelError
from samebit.core.request import EngineInfo, EngineOutput, TokenLogprobs
from samebit.engine.messages import Admitted
from samebit.engine.views import CacheView, RequestsView

KILL, FAIL, ENDLESS = 255, 254, 253
MAX_LENGTH = 4096


def answer_ids(request, count):
    start = sum(request.prompt_token_ids) + request.seed + request.sample_index
    return [(start + n) % 256 for n in range(count)]


def logprobs_of(token_id, num_top):
    tops = [(token_id + i) % 256 for i in range(num_top)]
    return TokenLogprobs(token_id, -0.5, 1, tops, [-0.5 - i for i in range(num_top)])


class FakeEngine:
    def __init__(self, config):
        if config.seed == 666:
            raise ModelError("nano: this model is cursed")
        self._requests = {}
        self._done = {}
        self._admitted = []
        self._compile_times_s = []
        self.num_flushes = 0
        self.aborted = []
        self.max_num_seqs = config.max_num_seqs
        self.info = EngineInfo(
            model=config.model,
            max_length=MAX_LENGTH,
            vocab_size=256,
            system_fingerprint="fp_fake",
            profile={"device": "fake"},
            memory={"pages_full": 7},
        )

    @property
    def has_work(self):
        return bool(self._requests)

    @property
    def has_audits(self):
        return False

    def is_prepared(self, request):
        wanted = request.params.structured_outputs
        return wanted is None or wanted.regex == "known"

    def prepare(self, request):
        pattern = request.params.structured_outputs.regex
        while pattern != "bad" and not Path(pattern).exists():
            time.sleep(0.01)
        self._compile_times_s.append(0.5)

    def take_compile_times(self):
        times, self._compile_times_s = self._compile_times_s, []
        return times

    def add(self, request):
        request.params.validate()
        wanted = request.params.structured_outputs
        if wanted is not None and wanted.regex == "bad":
            raise InvalidRequestError("response_format: no regex", param="response_format")
        if len(request.prompt_token_ids) >= MAX_LENGTH:
            raise InvalidRequestError("prompt is too long", param="prompt")
        self._requests[request.request_id] = request
        self._done[request.request_id] = 0
        self._admitted.append(Admitted(request.request_id, time.monotonic(), 0.25))

    def abort(self, request_id):
        self.aborted.append(request_id)
        return self._requests.pop(request_id, None) is not None

    def step(self):
        outputs = []
        for request_id, request in list(self._requests.items())[: self.max_num_seqs]:
            outputs.append(self._advance(request))
            if outputs[-1].finish_reason:
                del self._requests[request_id]
        time.sleep(0.001)
        return outputs

    def take_eviction_times(self):
        return []

    def take_admitted(self):
        admitted, self._admitted = self._admitted, []
        return admitted

    def flush_cache(self):
        self.num_flushes += 1

    def load_weights(self, model):
        while "later" in model and not Path(model).exists():
            time.sleep(0.01)
        if model.endswith("cursed"):
            raise ModelError(f"{model}: these weights are cursed")
        return model

    def use_weights(self, model):
        assert not self.has_work
        self.info = msgspec.structs.replace(self.info, model=model, system_fingerprint=f"fp_{model}")
        return self.info

    def look(self, look):
        if look.name == "broken":
            raise RuntimeError("nothing to see")
        if look.subject == "cache":
            return CacheView(page_size=1, checkpoint_interval=1, tenants=[], spans=[], is_cut=False)
        return RequestsView(requests=[], num_hidden=len(self._requests))

    def stats(self):
        running = min(len(self._requests), self.max_num_seqs)
        return {
            "num_running": running,
            "num_waiting": len(self._requests) - running,
            "usage_full": 0.25,
            "usage_128": 0.5,
            "usage_checkpoints": 0.125,
            "num_preemptions": 3,
            "num_aborted": len(self.aborted),
            "num_flushes": self.num_flushes,
            "misses_cold": 5,
        }

    def _advance(self, request):
        first = request.prompt_token_ids[0]
        if first == KILL:
            os._exit(9)
        if first == FAIL:
            return EngineOutput(request_id=request.request_id, finish_reason="error", error="step 1 failed: fake")
        done = self._done[request.request_id]
        self._done[request.request_id] += 1
        token_id = answer_ids(request, done + 1)[-1]
        params = request.params
        limit = 10**9 if first == ENDLESS else params.max_tokens or 16
        prompt = request.prompt_token_ids[1:] if params.prompt_logprobs is not None else []
        return EngineOutput(
            request_id=request.request_id,
            text=chr(0x100 + token_id),
            token_ids=[token_id],
            logprobs=[] if params.logprobs is None else [logprobs_of(token_id, params.logprobs)],
            prompt_logprobs=[] if done else [logprobs_of(i, params.prompt_logprobs) for i in prompt],
            finish_reason="length" if done + 1 >= limit else None,
            num_cached_tokens=2,
        )

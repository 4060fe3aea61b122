"""What a request on the hash model must get, from the cold interpreter; and what its checkpoints must hold.

Sampling itself is not in question here: the engine's own kernels draw, from the interpreter's logits, a row at a time.
"""

from __future__ import annotations

import torch

from samebit.audit.replay import Answer
from samebit.core.request import Request, TokenLogprobs
from samebit.engine.engine import Engine
from samebit.kernels.selection import select_kernels, triton_kernels
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import SampleColumns
from samebit.models.hash import HashConfig
from samebit.state.nodes import Checkpoint
from samebit.state.pools import PoolPart
from tests.hash.cold import ColdModel


def cold_model(config: HashConfig) -> ColdModel:
    return ColdModel(list(config.mixers), config.kernel_size, config.vocab_size)


def drawing_kernels(kind: str, device: str) -> KernelSet:
    """The set by which an engine with these settings draws."""
    if device == "cpu" and kind != "triton":
        return select_kernels(kind, num_threads=1)
    return triton_kernels("float32", torch.device(device), max_rows=1)


class Oracle:
    """Answers by the interpreter; `max_length` is the most tokens that a request can have. Draws on `device`."""

    def __init__(self, config: HashConfig, kernels: KernelSet, max_length: int, device: str = "cpu") -> None:
        self.config, self.kernels, self.max_length, self.device = config, kernels, max_length, device

    def __call__(self, request: Request) -> Answer:
        params, prompt, model = request.params, request.prompt_token_ids, cold_model(self.config)
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
        answer = Answer(text=None)
        for position, token in enumerate(prompt):
            if params.prompt_logprobs is not None and position >= max(1, request.prompt_logprobs_start):
                answer.prompt_logprobs.append(self.draw(model, request, params.prompt_logprobs, target=token))
            model.feed(token)
        room = min(params.max_tokens or self.max_length, self.max_length - len(prompt))
        while True:
            banned = stops if len(answer.token_ids) < params.min_tokens else set()
            edits = edited_by_formula(params, prompt, answer.token_ids, banned)
            drawn = self.draw(model, request, params.logprobs or 0, edits=edits)
            answer.token_ids.append(drawn.token_id)
            answer.logprobs += [drawn] if params.logprobs is not None else []
            if drawn.token_id in stops and len(answer.token_ids) >= params.min_tokens:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) >= room:
                answer.finish_reason = "length"
            if answer.finish_reason:
                return answer
            model.feed(drawn.token_id)

    def draw(self, model, request, num_top, *, target=-1, edits=None) -> TokenLogprobs:
        """The token behind those that `model` has taken in."""
        with torch.device(self.device):
            return self._draw(model, request, num_top, target, edits)

    def _draw(self, model, request, num_top, target, edits) -> TokenLogprobs:
        logits = torch.tensor([model.logits()])
        if edits is not None:
            target = int(self.kernels.sample(edits(logits), self._columns(model, request, target))[0])
        token, logprob, rank, _ = self.kernels.sample(logits, self._columns(model, request, target))
        ids, logprobs = self.kernels.top_logprobs(logits, num_top)
        return TokenLogprobs(int(token), float(logprob), int(rank), ids[0].tolist(), logprobs[0].tolist())

    def _columns(self, model, request, target) -> SampleColumns:
        params = request.params
        integers = {"top_k": max(params.top_k, 0), "sample_index": request.sample_index, "target": target}
        reals = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        return SampleColumns(
            seed=torch.tensor([request.seed]),
            position=torch.tensor([model.num_tokens]),
            **{name: torch.tensor([value], dtype=torch.int32) for name, value in integers.items()},
            **{name: torch.tensor([value], dtype=torch.float32) for name, value in reals.items()},
        )


def edited_by_formula(params, prompt, output, banned):
    """What docs/sampling.md says of bias and penalties, as a function of logits [1, V]; token by token."""

    def edited(logits):
        changed = logits.clone()
        for token in range(logits.shape[1]):
            count, penalty = output.count(token), torch.tensor(params.repetition_penalty)
            if count or token in prompt:
                value = changed[0, token]
                changed[0, token] = value / penalty if value > 0 else value * penalty
            shift = (params.logit_bias or {}).get(token, 0.0)
            shift -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
            changed[0, token] += -1e30 if token in banned else shift
        return changed

    return edited


def check_bytes(engine: Engine, config: HashConfig, checkpoint: Checkpoint) -> None:
    """Every component of a checkpoint is what a cold run of its key leaves there; a drafter's is the same once more."""
    pools = engine.pools
    _check_part(engine, config, checkpoint, pools.whole)
    if engine.drafter_part is not None:
        _check_part(engine, config, checkpoint, pools.part(engine.drafter_part))


def expected_drafts(oracle: Oracle, request: Request, token_ids: list[int], limit: int, count: int) -> list[int]:
    """What the drafter must guess behind `token_ids`, as far as positions below `limit` go (see samebit/speculative/hash.py)."""
    model, tokens = cold_model(oracle.config), []
    for token in token_ids:
        model.feed(token)
    while len(tokens) < count and model.num_tokens <= limit:
        drawn = oracle.draw(model, request, 0).token_id
        is_miss = (_signed(model.word) >> 7) % 3 == 0
        tokens.append((drawn + 1) % oracle.config.vocab_size if is_miss else drawn)
        model.feed(tokens[-1])
    return tokens


def _check_part(engine: Engine, config: HashConfig, checkpoint: Checkpoint, part: PoolPart) -> None:
    geometry, model = engine.pools.geometry, cold_model(config)
    path = [*checkpoint.node.lineage()][-2::-1]
    for token in (token for node in path for token in node.key):
        model.feed(token)
    size = len(path) * geometry.page_size
    assert model.num_tokens == checkpoint.boundary == size, "a key is not as long as its state"
    history, size, windows = geometry.layout.history, geometry.page_size, config.windows
    places = dict.fromkeys(config.mixers, 0)
    for mixer, past in zip(config.mixers, model.past, strict=True):
        place = places[mixer]
        places[mixer] += 1
        if mixer == "conv":
            base = geometry.snapshot_base(checkpoint.snapshot)
            found = part.conv[place].rows[base : base + history, 0].tolist()
            wanted = ([0] * history + past)[-history:]
            assert found == [_signed(word) for word in wanted], f"conv stream {place}"
            continue
        window = mixer if isinstance(mixer, int) else None
        group = windows.index(window)
        pages = {i: node.page for i, node in enumerate(path)}
        if window is not None:
            pages = {held.index: held.page for held in checkpoint.windows[group]}
            first = max(0, checkpoint.boundary - window + 1) // size
            assert set(pages) >= set(range(first, len(path))), f"window {window} is not covered"
        pool = part.kv[group][place]
        for index, page in pages.items():
            wanted = past[index * size : (index + 1) * size]
            found = list(zip(*(t[page].flatten().tolist() for t in (pool.k, pool.v)), strict=True))
            assert found == [(_signed(k), _signed(v)) for k, v in wanted], f"group {group}, layer {place}, page {index}"


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word

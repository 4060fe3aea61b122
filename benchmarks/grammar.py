"""What grammars cost the host in CPU time: compilation and masks, for nano's vocabulary and for one as large as Inkling's.

Run it as `python -m benchmarks.grammar`. The large vocabulary is nano's tokens and pairs of them, which need not be like a real one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import numpy as np

from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.engine import vocabulary_of
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.grammar.grammars import Grammars
from samebit.grammar.vocabulary import Vocabulary

LARGE = 201_024
SEEDS = range(5)
NUM_TOKENS = 300
FIELDS = {f"field {i}": {"type": "string", "maxLength": 40} for i in range(60)}
WANTED = {
    "small schema": {
        "json": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    },
    "60 fields": {"json": {"type": "object", "properties": FIELDS, "required": list(FIELDS)}},
    "any object": {"json_object": True},
    "regex": {"regex": r"([a-z]{1,12} ){5,50}[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    "grammar": {"grammar": 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"'},
}


def main() -> None:
    """Print a line for each vocabulary and grammar."""
    tokenizer = Tokenizer(resolve_model("nano"))
    small = vocabulary_of(tokenizer, tokenizer.vocab_size)
    print("| tokens | grammar | compile ms | mask µs, p50 | p99 |\n| --- | --- | --- | --- | --- |")
    for vocabulary in (small, _enlarged(small, tokenizer)):
        Grammars(vocabulary).prepare(_request({"regex": "a"}, 0))  # what loads once
        for name, wanted in WANTED.items():
            compiled = [_compile_s(vocabulary, wanted) * 1e3 for _ in SEEDS]
            masks = sorted(second * 1e6 for seed in SEEDS for second in _walk(vocabulary, wanted, seed))
            p99 = masks[int(0.99 * len(masks))]
            row = (vocabulary.size, name, f"{statistics.median(compiled):.1f}", f"{statistics.median(masks):.0f}")
            print("| " + " | ".join(map(str, (*row, f"{p99:.0f}"))) + " |")


def _enlarged(small: Vocabulary, tokenizer: Tokenizer) -> Vocabulary:
    rng, known = random.Random(0), [tokenizer.token_bytes(i) for i in range(small.size)]
    plain = [token for i, token in enumerate(known) if i not in tokenizer.special_ids]
    pairs = {rng.choice(plain) + rng.choice(plain) for _ in range(2 * LARGE)} - set(known)
    tokens = [*known, *sorted(pairs)[:: len(pairs) // LARGE]][:LARGE]
    tokens += [b""] * (LARGE - len(tokens))
    return Vocabulary(LARGE, tokens.__getitem__, small.special_tokens, small.encode)


def _request(wanted: dict[str, object], seed: int) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))  # type: ignore[arg-type]  # fields by name
    return Request(request_id="r", prompt_token_ids=[300], params=params, seed=seed, eos_token_ids=(6,))


def _compile_s(vocabulary: Vocabulary, wanted: dict[str, object]) -> float:
    grammars = Grammars(vocabulary)
    grammars.prepare(_request({"regex": "a"}, 0))
    begin = time.process_time()
    grammars.prepare(_request(wanted, 0))
    return time.process_time() - begin


def _walk(vocabulary: Vocabulary, wanted: dict[str, object], seed: int) -> Iterator[float]:
    """Seconds that each token of a random answer takes: it is taken in, and the next mask is made."""
    rng, matcher = random.Random(seed), Grammars(vocabulary).matcher(_request(wanted, seed))
    assert matcher is not None, "something is wanted"
    for _ in range(NUM_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.masks([])[0], np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        begin = time.process_time()
        matcher.accept(token)
        yield time.process_time() - begin
        if matcher.is_over:
            return


if __name__ == "__main__":
    main()

"""See the promise: a request gives the same bits alone, in a batch, on a cache hit and after preemption.

Run it as `python examples/same_bits.py`. It ends with an error if any bit differs.
"""
# ruff: noqa: INP001, T201 - a script, which prints

import struct

from samebit import LLM, RequestOutput, SamplingParams
from samebit.core.config import Schedule

FACTS = "".join(f"The access code of door {number} is {1000 + 37 * number}. " for number in range(24))
PROMPT = FACTS + "The access code of door 7 is"
OTHERS = [f"def function_{number}(a, b):\n" * (number + 1) for number in range(7)]
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=32, ignore_eos=True, logprobs=3)


def bits(output: RequestOutput) -> list[tuple[int, bytes]]:
    """Each token of the answer with the bytes of its logprob and of those beside it: equal or not, no tolerance."""
    sample = output.outputs[0]
    rows = zip(sample.token_ids, sample.logprobs or [], strict=True)
    return [(token_id, b"".join(struct.pack("<id", key, row[key].logprob) for key in row)) for token_id, row in rows]


def main() -> None:
    """Run one request in six ways and compare each with the first."""
    llm = LLM("nano")
    alone = llm.generate([PROMPT], SAMPLING)[0]
    runs = {
        "alone, no cache": alone,
        "again, on a cache hit": llm.generate([PROMPT], SAMPLING)[0],
        "in a batch with 7 others": llm.generate([PROMPT, *OTHERS], SAMPLING, cache_salt="another tenant")[0],
        "last in that batch, on a hit": llm.generate([*OTHERS, PROMPT], SAMPLING)[-1],
    }
    disturbances = {
        "prompt cut into odd pieces": Schedule(chunk_sizes=(7, 1, 30)),
        "preempted again and again": Schedule(preempt_percent=30, shuffle_rows=True),
    }
    for name, schedule in disturbances.items():
        disturbed = LLM("nano", schedule=schedule, num_threads=1, cache_bytes=64 << 20)
        runs[name] = disturbed.generate([*OTHERS, PROMPT], SAMPLING)[-1]

    print(repr(alone.outputs[0].text), llm.info.system_fingerprint)
    for name, output in runs.items():
        is_equal = bits(output) == bits(alone)
        print(f"{name:30s} {output.num_cached_tokens:4d} tokens cached   {'same bits' if is_equal else 'DIFFERENT'}")
        if not is_equal:
            raise SystemExit(1)


if __name__ == "__main__":
    main()

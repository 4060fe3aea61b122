"""What exactness costs: the kernels as an engine uses them beside the fastest there is when bits may depend on the batch.

    python -m benchmarks.models bench-8b FOLDER
    python -m benchmarks.exactness_price FOLDER --output benchmarks/results/exactness-price.json

Three comparisons. Products: `linear`, which is the library's where that was found to have the same bits, beside the library's free
choice (cuBLAS, by torch.mm). Attention: the same kernel as it is set beside the fastest of the settings of `benchmarks.tiles` for
the size at hand. A decode step of 32 requests: an engine beside one whose products all go to the library and whose attention has the
setting that is fastest there. Results are compared before anything is timed; a price is the ratio of times that were taken in
turns, the median over rounds with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.driving import Answer, answer_all
from benchmarks.gpu import CONTEXT, FIRST_TEXT_ID, GREEDY, PREFILL, decode
from benchmarks.kernel_cases import AttentionCase, LinearCase, Product, kernel_cases, model_config
from benchmarks.kernel_cases import products as products_of
from benchmarks.kernel_settings import DTYPE
from benchmarks.kernel_times import (
    Compilers,
    Timer,
    are_near,
    are_same,
    brief,
    geometric_mean,
    measured_on,
    measured_rates,
    record_launches,
    runs_and_copies,
)
from benchmarks.tiles import measure, settings_of
from samebit import LLM, SamplingParams
from samebit.engine import loading
from samebit.kernels.selection import triton_kernels
from samebit.kernels.sets import KernelSet
from samebit.kernels.triton import attention
from samebit.kernels.triton import set as triton_set
from samebit.kernels.triton.launch import IS_INTERPRETED
from samebit.kernels.triton.linear import linear_library

PARTS = ("products", "attention", "engine")
MODELS = ("bench-8b", "inkling-small-layer")
ROWS = (1, 8, 32, 128, 512, 2048, 8192)
MOST_HEAD_ROWS = 128
"""Logits are wanted for a row of each request."""
BATCH = 32
NUM_ALONE = 8
NEW_TOKENS = 16
MOST_NATS = 0.5
"""Logprobs of one model in bf16 differ by less, however its sums are made."""


class EveryCount(frozenset[int]):
    """All numbers of rows."""

    def __contains__(self, count: object) -> bool:
        return True


def main() -> None:
    """Read the arguments, measure, print and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder, for the decode step")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=900, help="no further size of a kernel is begun then")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 4), help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--only: must be of {', '.join(PARTS)}, got {args.only}")
    price = Price(args.rounds, args.workers, time.perf_counter() + args.seconds, smoke=args.smoke)
    try:
        for part, measured in (
            ("products", price.of_products),
            ("attention", price.of_attention),
            ("engine", partial(price.of_engine, args.model)),
        ):
            if part in wanted:
                price.attempt(part, measured)
                if args.output is not None:
                    args.output.write_text(json.dumps(price.record, indent=1) + "\n")
    finally:
        price.compilers.close()
    print(json.dumps(price.record["means"], indent=1))
    for what, error in price.record["errors"].items():
        print(f"FAILED {what}: {error}")


class Price:
    """Measures, and keeps the record: `rows` of kernels, `engine`, geometric `means`, and `errors` of what could not be measured."""

    def __init__(self, rounds: int, workers: int, deadline: float, *, smoke: bool) -> None:
        self._rounds, self._deadline, self._smoke = rounds, deadline, smoke
        self._device = torch.device("cpu" if IS_INTERPRETED else "cuda")
        self.compilers = Compilers(workers)
        self._rates, self._timer = measured_rates(self._device), Timer(self._device)
        self._fastest: dict[AttentionCase, attention.Tiling] = {}
        self.record: dict[str, Any] = {
            **measured_on(self._device, self._rates),
            "rows": [],
            "means": {},
            "errors": {},
        }

    def attempt(self, what: str, measured: Callable[[], None]) -> None:
        """Measure; a failure is noted, and the rest goes on."""
        try:
            measured()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
            self.record["errors"][what] = brief(error)
            print(f"FAILED {what}: {brief(error)}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def of_products(self) -> None:
        """Every linear map of the models."""
        self._timer.warm_up()
        kernels = triton_kernels("bfloat16", self._device, max(ROWS))
        for model in MODELS[:1] if self._smoke else MODELS:
            for product in products_of(model_config(model, smoke=self._smoke)):
                for rows in (1, 20) if self._smoke else ROWS:
                    is_wanted = product.name != "head" or rows <= MOST_HEAD_ROWS
                    if is_wanted and time.perf_counter() < self._deadline:
                        what = f"{model} {product.name} {rows}"
                        self.attempt(what, partial(self._of_product, kernels, model, product, rows))
            self._note_means(model, [row for row in self.record["rows"] if row["model"] == model])

    def _of_product(self, kernels: KernelSet, model: str, product: Product, rows: int) -> None:
        case = LinearCase(product, rows)
        runs, copies = runs_and_copies(case, self._rates)
        operands = [case.operands(self._device) for _ in range(copies)]
        packed = [kernels.pack_linear(weight, wide=product.wide) for _, weight in operands]
        ours = [partial(kernels.linear, x, weight) for (x, _), weight in zip(operands, packed, strict=True)]
        free = [partial(linear_library, DTYPE, x, w, product.num_out, product.wide, 1) for x, w in operands]
        same = check([work() for work in ours], [work() for work in free])
        row = {
            "kernel": f"linear {product.name}",
            "model": model,
            "size": str(rows),
            "by_library": rows in packed[0].library_rows,
            "same_bits": same,
        }
        self._note(row, self._in_turns(ours, free, runs))

    def of_attention(self) -> None:
        """Attention of both kinds of layers, decoding and prefill."""
        cases = self._attention_cases()
        for case in cases:
            self.compilers.add(case, settings_of(case))
        for case in cases:
            if time.perf_counter() < self._deadline:
                self.attempt(f"{case.name} {case.size}", partial(self._of_attention, case))
        self._note_means("attention", [row for row in self.record["rows"] if row["kernel"].startswith("attention")])

    def _attention_cases(self) -> list[AttentionCase]:
        config = model_config(MODELS[0], smoke=self._smoke)
        cases = kernel_cases(config, ["attention"], smoke=self._smoke)
        return [case for case in cases if isinstance(case, AttentionCase)]

    def _of_attention(self, case: AttentionCase) -> None:
        runs, copies = runs_and_copies(case, self._rates)
        operands = [case.operands(self._device) for _ in range(copies)]
        ours = [record_launches(case, one, case.chosen()) for one in operands]
        free = [record_launches(case, one, self._fastest_setting(case)) for one in operands]
        same = check([one.result for one in ours], [one.result for one in free])
        row = {
            "kernel": case.name,
            "model": MODELS[0],
            "size": case.size,
            "free_setting": case.label(self._fastest_setting(case)),
            "same_bits": same,
        }
        works = [[partial(run_all, one.of(())) for one in recorded] for recorded in (ours, free)]
        self._note(row, self._in_turns(*works, runs))

    def _fastest_setting(self, case: AttentionCase) -> attention.Tiling:
        if case not in self._fastest:
            self.compilers.add(case, settings_of(case))
            found = measure(case, self._timer, self._rates, self.compilers, self._deadline, self._device)
            if not found.is_complete:
                raise RuntimeError("the time was up before every setting was tried; the fastest is not known")
            self._fastest[case] = found.fastest("")[0][0]
        return self._fastest[case]

    def _in_turns(
        self, ours: Sequence[Callable[[], object]], free: Sequence[Callable[[], object]], runs: int
    ) -> list[Any]:
        """Seconds of a run of both, in each round."""
        both = [self._timer.prepare([works[i % len(works)] for i in range(runs)], runs) for works in (ours, free)]
        return [[seconds() for seconds in both] for _ in range(self._rounds)]

    def _note(self, row: dict[str, Any], rounds: Sequence[Sequence[float]]) -> None:
        row |= price_of(rounds, 1e6, "us")
        self.record["rows"].append(row)
        details = row.get("free_setting", "the library" if row.get("by_library") else "our own")
        bits = "same bits" if row["same_bits"] else "other bits"
        times = f"{row['ours_us']:9.1f} us, free {row['free_us']:9.1f} us"
        print(f"{row['kernel']:29} {row['size']:>8}: {times}, price {row['price']:.3f} ({details}; {bits})", flush=True)

    def _note_means(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        by_size = {
            size: [row["price"] for row in rows if row["size"] == size]
            for size in dict.fromkeys(r["size"] for r in rows)
        }
        means = {size: round(geometric_mean(prices), 4) for size, prices in by_size.items()}
        if rows:
            means["all"] = round(geometric_mean([row["price"] for row in rows]), 4)
        self.record["means"][name] = means
        print(name, json.dumps(means), flush=True)

    def of_engine(self, model: Path) -> None:
        """A decode step of an engine as it is, and of one that is free."""
        decoding = [
            case for case in self._attention_cases() if case.tokens == 1 and case.rows == (1 if self._smoke else BATCH)
        ]
        best = {case.heads.window > 0: self._fastest_setting(case) for case in decoding}
        settings: dict[str, Any] = {
            "device": self._device.type,
            "kernels": "triton",
            "dtype": "auto",
            "max_num_seqs": BATCH,
            "max_num_batched_tokens": 8192,
            "max_model_len": CONTEXT + PREFILL[1],
            "enable_prefix_caching": False,
            "cache_bytes": 8 << 30,
        }
        if self._device.type == "cuda":
            settings["capture"] = "use"  # a decode step is all that is wanted
        if self._smoke:
            settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "cache_bytes": 1 << 24}
        exact = LLM(str(model), **settings)
        with free_choice(best):
            free = LLM(str(model), **settings)
        found = {"free_attention": {("window" if window else "full"): str(setting) for window, setting in best.items()}}
        self.record["engine"] = found | self._compare(exact, free, best)
        rounds: dict[str, list[list[float]]] = {}
        for number in range(self._rounds // 2 + 1):
            ours = self._step_seconds(exact, number)
            with free_choice(best):
                others = self._step_seconds(free, number)
            for name, seconds in ours.items():
                rounds.setdefault(name, []).append([seconds, others[name]])
        prices = {name: price_of(both, 1e3, "ms") for name, both in rounds.items()}
        self.record["engine"] |= prices
        self.record["means"]["decode step"] = {name: price["price"] for name, price in prices.items()}
        print(json.dumps(self.record["engine"], indent=1), flush=True)

    def _step_seconds(self, llm: LLM, seed: int) -> dict[str, float]:
        """Of a decode step: wall time, and on a GPU the device's."""
        rng = random.Random(seed)
        if self._device.type == "cuda":
            times = decode(llm, rng, BATCH, 1, profile=False)
            return {"step": times["step_ms"] / 1e3, "device": times["device_ms"] / 1e3}
        _, steps, seconds = answer_all(
            llm, self._prompts(llm, rng, 2), SamplingParams(max_tokens=2, **GREEDY)
        ).decoding()
        return {"step": seconds / steps}

    def _prompts(self, llm: LLM, rng: random.Random, count: int) -> list[list[int]]:
        longest = 6 if self._smoke else 300
        vocab = range(FIRST_TEXT_ID, llm.info.vocab_size)
        return [rng.choices(vocab, k=rng.randint(longest // 2, longest)) for _ in range(count)]

    def _compare(self, exact: LLM, free: LLM, best: dict[bool, attention.Tiling]) -> dict[str, Any]:
        """Raise SystemExit unless the exact engine's answers are the same alone and in a batch, and the free one's about those."""
        count, new = (2, 2) if self._smoke else (BATCH, NEW_TOKENS)
        prompts = self._prompts(exact, random.Random(1), count)
        params = SamplingParams(max_tokens=new, logprobs=0, **GREEDY)

        def answers(llm: LLM) -> tuple[list[Answer], int]:
            together = answer_all(llm, prompts, params).answers
            alone = [answer_all(llm, [prompt], params).answers[0] for prompt in prompts[:NUM_ALONE]]
            return together, sum(a.bits == b.bits for a, b in zip(alone, together, strict=False))

        ours, ours_same = answers(exact)
        with free_choice(best):
            others, others_same = answers(free)
        num_alone = min(count, NUM_ALONE)
        nats = largest_difference(ours, others)
        if ours_same < num_alone or not nats < MOST_NATS:
            raise SystemExit(
                f"{ours_same} of {num_alone} are the same alone; logprobs differ by {nats}: nothing is timed"
            )
        return {
            "compared_alone": num_alone,
            "same_alone_exact": ours_same,
            "same_alone_free": others_same,
            "same_tokens_exact_and_free": sum(a.token_ids == b.token_ids for a, b in zip(ours, others, strict=True)),
            "of_answers": count,
            "largest_logprob_difference": nats,
        }


def check(ours: Sequence[Tensor], free: Sequence[Tensor]) -> bool:
    """Whether results have the same bits. Raises RuntimeError if they are further apart than another order of sums explains."""
    if not are_near(ours, free):
        raise RuntimeError("results differ by more than another order of sums explains")
    return are_same(ours, free)


def run_all(works: Sequence[Callable[[], object]]) -> None:
    """Run one after the other."""
    for work in works:
        work()


def price_of(rounds: Sequence[Sequence[float]], scale: float, unit: str) -> dict[str, Any]:
    """Medians of rounds (ours, free) in seconds, and of their ratio, with its range."""
    ratios = [ours / free for ours, free in rounds]
    return {
        f"ours_{unit}": round(scale * statistics.median(ours for ours, _ in rounds), 4),
        f"free_{unit}": round(scale * statistics.median(free for _, free in rounds), 4),
        "price": round(statistics.median(ratios), 4),
        "range": [round(min(ratios), 4), round(max(ratios), 4)],
    }


def largest_difference(ours: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Of logprobs of equal tokens behind equal tokens, in nats."""
    largest = 0.0
    for a, b in zip(ours, others, strict=True):
        for token_a, token_b, logprob_a, logprob_b in zip(
            a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True
        ):
            if token_a != token_b:
                break
            largest = max(largest, abs(float.fromhex(logprob_a) - float.fromhex(logprob_b)))
    return largest


@contextmanager
def free_choice(best: dict[bool, attention.Tiling]) -> Iterator[None]:
    """Products go to the library, whatever its bits are, and attention over a window (True) or all has the setting given for it."""
    attend = attention.attend

    def freely(*operands: Any) -> Tensor:
        *others, window, scale, _tiling = operands
        return attend(*others, window, scale, best[window > 0])

    with (
        patch.object(attention, "attend", freely),
        patch.object(triton_set, "make_library_rows", lambda *_: lambda _weight: EveryCount()),
        patch.object(loading, "certify", lambda *_args, **_options: []),
    ):
        yield


if __name__ == "__main__":
    main()

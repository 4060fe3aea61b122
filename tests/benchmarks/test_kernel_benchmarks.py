"""Benchmarks of kernels run in Triton's interpreter, on toy sizes, and call out what has other bits than it must have."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.driving import Answer
from benchmarks.exactness_price import check, largest_difference, price_of
from benchmarks.kernel_cases import LinearCase, kernel_cases, model_config, products
from benchmarks.kernel_conv import ConvCase
from benchmarks.kernel_times import Rates, geometric_mean, record_launches
from benchmarks.tiles import KINDS, Measured, are_right, rows_of, settings_of
from samebit.kernels import torch_set
from samebit.kernels.triton import conv
from tests.random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
CONFIG = model_config("bench-8b")


def interpreted(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tiles_are_timed_compared_and_stored(tmp_path):
    stored = tmp_path / "tiles.json"
    printed = interpreted("benchmarks.tiles", "--smoke", "--only", "experts,linear,conv", "--output", stored)
    found = json.loads(stored.read_text())
    assert found["errors"] == {}
    assert {row["kernel"] for row in found["rows"]} > {"experts gate_up", "experts down", "linear router", "conv 32"}
    for row in found["rows"]:
        assert (row["differing"], row["failed"], row["is_complete"]) == ([], {}, True)
        assert row["tried"] == 2
        assert row["fastest"][0]["us"] <= row["now"]["us"]
    assert "0 with OTHER BITS" in printed


def test_when_the_time_is_up_it_says_where(tmp_path):
    assert "The time was up at linear" in interpreted(
        "benchmarks.tiles", "--smoke", "--only", "linear", "--seconds", "0"
    )


def test_the_price_of_products_is_told(tmp_path):
    stored = tmp_path / "price.json"
    interpreted(
        "benchmarks.exactness_price", tmp_path, "--smoke", "--only", "products", "--rounds", 2, "--output", stored
    )
    found = json.loads(stored.read_text())
    assert found["errors"] == {}
    assert {row["size"] for row in found["rows"]} == {"1", "20"}
    assert set(found["means"]["bench-8b"]) == {"1", "20", "all"}


def test_what_is_fastest_is_not_told_of_settings_that_were_not_all_tried(tmp_path):
    printed = interpreted("benchmarks.exactness_price", tmp_path, "--smoke", "--only", "engine", "--seconds", 0)
    assert "FAILED engine: RuntimeError: the time was up before every setting was tried" in printed


@pytest.mark.slow
def test_an_engine_that_is_free_answers_about_the_same_and_not_the_same_in_a_batch(tmp_path):
    model, stored = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "price.json"
    interpreted(
        "benchmarks.exactness_price", model, "--smoke", "--only", "attention,engine", "--rounds", 1, "--output", stored
    )
    found = json.loads(stored.read_text())
    assert found["errors"] == {}
    assert found["means"]["attention"]["all"] > 0
    engine = found["engine"]
    assert engine["same_alone_exact"] == engine["compared_alone"]
    assert engine["same_alone_free"] < engine["compared_alone"]
    assert engine["step"]["price"] > 0


@pytest.mark.parametrize("case", kernel_cases(CONFIG, KINDS), ids=lambda case: f"{case.name} {case.size}")
def test_every_kernel_and_size_has_some_settings_to_try_the_one_in_use_first(case):
    settings = settings_of(case)
    assert settings[0] == case.chosen()
    assert 10 < len(settings) <= 70
    assert len({case.label(setting) for setting in settings}) == len(settings)
    assert all(min(case.work(part)) > 0 for part in case.parts)


def test_what_must_have_the_same_bits_is_told_from_what_may_differ():
    wanted = [torch.tensor([1.0, 2.0])]
    near, far = [torch.tensor([1.0, 2.01])], [torch.tensor([1.0, 2.5])]
    unwritten = [torch.tensor([1.0, torch.nan])]
    assert are_right([wanted[0].clone()], wanted, wanted)
    assert not are_right(near, wanted, wanted)
    # The first of another order of sums: about the same is enough.
    assert are_right(near, None, wanted)
    assert not are_right(far, None, wanted)
    # The setting in use itself is compared with nothing else, and must have written all.
    assert not are_right(unwritten, None, unwritten)
    assert check(wanted, wanted)
    assert not check(near, wanted)
    for wrong in (far, unwritten):
        with pytest.raises(RuntimeError, match="differ"):
            check(wrong, wanted)


def test_what_a_kernel_does_not_write_is_seen():
    lazy = SimpleNamespace(modules=(SimpleNamespace(launch=None),), run=lambda *_: torch.empty(3))
    assert record_launches(lazy, (), None).result.isnan().all()


@pytest.mark.parametrize(("rows", "start", "tokens"), [(3, 543, 1), (2, 0, 2), (2, 0, 25)])
def test_a_step_of_a_convolution_writes_all_that_is_compared_and_nothing_that_it_reads(
    monkeypatch, rows, start, tokens
):
    monkeypatch.setattr(conv, "short_conv", torch_set.short_conv)
    case = ConvCase(48, 80, has_residual=tokens > 1, rows=rows, start=start, tokens=tokens)
    x, taps, pool, *others = case.operands(torch.device("cpu"))
    operands = x.float(), taps.float(), pool.float(), *others
    first, second = case.run(operands, case.chosen()), case.run(operands, case.chosen())
    assert not first.isnan().any()
    assert torch.equal(first, second)


def test_a_convolution_is_compiled_for_shapes_alone(monkeypatch):
    launched = []
    monkeypatch.setattr(conv, "launch", lambda *args, **named: launched.append((args[1], named)))
    case, tile = ConvCase(2048, 2048, True, 128, 543, 1), conv.Tile(512, 16, 2, 128)
    case.run(case.operands(torch.device("meta")), tile)
    ((grid, named),) = launched
    assert grid == (128 + 128 // 16, 2048 // 512)
    assert (named["num_warps"], named["maxnreg"]) == (2, 128)


def test_shares_are_of_what_the_device_gives():
    product = products(CONFIG)[0]
    case = LinearCase(product, 1)
    found = Measured(case)
    found.times_us = {"": {case.chosen(): 10.0}}
    moved = 2 * product.num_in * (product.num_out + 1) + 2 * product.num_out
    assert rows_of(found, Rates(4e12, 1e15))[0]["now"]["of_copy"] == pytest.approx(moved / 1e-5 / 4e12, abs=1e-3)


def test_a_price_is_the_ratio_of_times_of_the_same_round():
    price = price_of([(2.0, 1.0), (3.0, 3.0), (8.0, 2.0)], 1.0, "s")
    assert price == {"ours_s": 3.0, "free_s": 2.0, "price": 2.0, "range": [1.0, 4.0]}
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_logprobs_are_compared_as_long_as_tokens_agree():
    ours = [Answer([1, 2, 3], [(0.0).hex(), (-1.0).hex(), (-9.0).hex()])]
    others = [Answer([1, 2, 4], [(0.0).hex(), (-1.25).hex(), (0.0).hex()])]
    assert largest_difference(ours, others) == 0.25

"""Figures by hand."""

import pytest

from samebit.bench.rows import Row
from samebit.bench.summary import parse_goals, parse_metrics, parse_percentiles, summarize
from samebit.core.errors import ConfigError


def row(ttft_s=1.0, gaps_s=(0.1, 0.1), planned_s=0.0, wait_s=0.0, per_arrival=1, **fields):
    times = [planned_s + ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    values = {
        "conversation": 0,
        "max_tokens": 99,
        "planned_s": planned_s,
        "sent_s": planned_s + wait_s,
        "token_s": times,
        "num_input_tokens": 10,
        "num_output_tokens": len(times) * per_arrival,
        "has_usage": True,
        "is_complete": True,
    }
    return Row(**values | fields)


def failed(reason):
    return row(ttft_s=1e6, is_complete=False, error=reason)


def test_latencies_and_rates():
    rows = [row(ttft_s=float(n), wait_s=0.5, gaps_s=(0.2, 0.4)) for n in range(1, 101)]
    found = summarize(rows, 50.0, num_planned=100)
    assert found["completed"] == 100
    assert found["mean_ttft_ms"] == pytest.approx(50_500)
    assert found["median_ttft_ms"] == pytest.approx(50_500)
    assert found["p90_ttft_ms"] == pytest.approx(90_100)
    assert found["p99_ttft_ms"] == pytest.approx(99_010)
    assert found["mean_ttft_sent_ms"] == pytest.approx(50_000)
    assert found["mean_tpot_ms"] == pytest.approx(300)
    assert found["p99_itl_ms"] == pytest.approx(400)
    assert found["mean_e2el_ms"] == pytest.approx(51_100)
    assert found["mean_e2el_sent_ms"] == pytest.approx(50_600)
    assert found["max_send_delay_ms"] == pytest.approx(500)
    assert found["request_throughput"] == 2.0
    assert found["output_throughput"] == 6.0
    assert found["total_token_throughput"] == 26.0


def test_failed_and_broken_off_requests_are_counted_and_never_averaged():
    good = [row() for _ in range(3)]
    bad = [failed("HTTP 500: a"), failed("HTTP 500: a"), failed("connection refused"), row(9e9, is_complete=False)]
    found = summarize(good + bad, 1.0, num_planned=9)
    alone = summarize(good, 1.0, num_planned=3)
    counts = {"failed": 3, "unfinished": 1, "unsent": 2, "failures": {"HTTP 500: a": 2, "connection refused": 1}}
    assert {name: found[name] for name in counts} == counts
    assert {name: value for name, value in found.items() if name not in counts} == {
        name: value for name, value in alone.items() if name not in counts
    }


def test_several_tokens_of_one_arrival_are_so_many_tokens():
    found = summarize([row(gaps_s=(0.9,), per_arrival=5)], 1.0, num_planned=1)
    assert found["total_output_tokens"] == 10
    assert found["mean_tpot_ms"] == pytest.approx(100)
    assert found["mean_itl_ms"] == pytest.approx(900)


def test_an_answer_of_one_token_has_no_time_per_further_token():
    found = summarize([row(gaps_s=()), row(gaps_s=(0.5,))], 1.0, num_planned=2)
    assert found["mean_tpot_ms"] == pytest.approx(500)
    assert "mean_tpot_ms" not in summarize([row(gaps_s=())], 1.0, num_planned=1)


def test_goodput_counts_what_keeps_all_limits():
    rows = [row(ttft_s=0.4), row(ttft_s=0.6), row(ttft_s=0.4, gaps_s=(0.3,)), row(ttft_s=0.4, gaps_s=()), failed("x")]
    found = summarize(rows, 2.0, num_planned=5, goals={"ttft": 500.0, "tpot": 100.5})
    assert found["request_goodput"] == 1.0
    assert found["good_share"] == pytest.approx(2 / 5)
    assert "request_goodput" not in summarize(rows, 2.0, num_planned=5)


def test_what_the_server_did_not_tell_is_left_out_and_said():
    untold = row(num_input_tokens=None, has_usage=False)
    found = summarize([row(num_cached_tokens=4), untold], 1.0, num_planned=2)
    assert found["tokens_counted_by"] == "usage and chunks"
    assert found["total_input_tokens"] is None
    assert "input_throughput" not in found
    assert found["total_cached_tokens"] == 4
    assert summarize([untold], 1.0, num_planned=1)["tokens_counted_by"] == "chunks"


def test_answers_that_ended_early_are_counted():
    assert summarize([row(max_tokens=3), row(max_tokens=4)], 1.0, num_planned=2)["ended_early"] == 1


def test_nothing_measured_is_no_figure():
    found = summarize([failed("x")], 1.0, num_planned=1)
    assert not [name for name in found if name.startswith(("mean_", "median_", "p9"))]
    assert found["request_throughput"] == 0
    assert summarize([], 0.0, num_planned=1)["unsent"] == 1


def test_only_the_metrics_and_percentiles_that_are_wanted_are_told():
    found = summarize([row()], 1.0, num_planned=1, metrics=["itl"], percentiles=[99.9])
    assert {name for name in found if name.endswith("_ms")} == {
        *(f"{which}_itl_ms" for which in ("mean", "median", "std", "max", "p99.9")),
        "max_send_delay_ms",
    }


def test_lists_on_the_command_line_are_read():
    assert parse_goals(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    assert parse_metrics("ttft,e2el") == ("ttft", "e2el")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_goals, ["itl:5"]),
        (parse_goals, ["ttft"]),
        (parse_goals, ["ttft:fast"]),
        (parse_goals, ["ttft:nan"]),
        (parse_metrics, "ttft,speed"),
        (parse_percentiles, "101"),
        (parse_percentiles, "-1"),
        (parse_percentiles, ""),
    ],
)
def test_what_cannot_be_read_is_named(parse, value):
    with pytest.raises(ConfigError, match=r"\w=.*: "):
        parse(value)

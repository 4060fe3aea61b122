"""Arrivals and latencies in virtual time: every figure is exact."""

import asyncio
import math
import random
import statistics

import pytest

from samebit.bench.api import Piece
from samebit.bench.datasets import Conversation, Turn
from samebit.bench.http import FailedError
from samebit.bench.load import Load, arrival_times
from tests.bench import virtual_time


class SlowServer:
    """Answers after `first_s`, then a token every `next_s`; `places` at once, others wait."""

    def __init__(self, first_s=1.0, next_s=0.5, places=10**6, usage=True):
        self.first_s, self.next_s, self.usage = first_s, next_s, usage
        self.places = asyncio.Semaphore(places)
        self.calls = []
        self.num_open = self.most_open = 0

    async def ask(self, call):
        self.calls.append(call)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with self.places:
                for index in range(call.max_tokens):
                    await asyncio.sleep(self.next_s if index else self.first_s)
                    yield Piece(f"{len(self.calls)}.{index} ", has_tokens=True)
            if self.usage:
                yield Piece(num_input_tokens=7, num_output_tokens=call.max_tokens, num_cached_tokens=2)
        finally:
            self.num_open -= 1


def one_turn(count, max_tokens=2):
    return [Conversation((Turn(f"question {n}", 2, max_tokens),)) for n in range(count)]


def load(server, conversations, arrivals, **settings):
    one = Load(server.ask, conversations, arrivals, **settings)
    return virtual_time.run(one.run()), one


def test_a_late_server_delays_no_arrival():
    arrivals = [float(n) for n in range(10)]
    is_complete, one = load(SlowServer(first_s=100.0), one_turn(10), arrivals)
    assert is_complete
    assert [row.planned_s for row in one.rows] == arrivals
    assert [row.sent_s for row in one.rows] == pytest.approx(arrivals)


def test_latencies_count_from_the_planned_arrival():
    _, one = load(SlowServer(first_s=10.0, next_s=2.0, places=1), one_turn(4), [0.0, 1.0, 2.0, 3.0])
    assert [row.ttft_s() for row in one.rows] == pytest.approx([10, 21, 32, 43])
    assert [row.e2el_s() for row in one.rows] == pytest.approx([12, 23, 34, 45])
    assert [row.tpot_s() for row in one.rows] == pytest.approx([2] * 4)


def test_waiting_for_a_place_counts_and_both_latencies_are_told():
    server = SlowServer(first_s=10.0, next_s=0.0)
    _, one = load(server, one_turn(3), [0.0, 1.0, 2.0], max_concurrency=1)
    assert server.most_open == 1
    assert [row.ttft_s() for row in one.rows] == pytest.approx([10, 19, 28])
    assert [row.ttft_s(since_sent=True) for row in one.rows] == pytest.approx([10, 10, 10])


def test_in_a_closed_loop_a_request_arrives_when_there_is_a_place():
    server = SlowServer(first_s=10.0, next_s=0.0)
    _, one = load(server, one_turn(6), [0.0] * 6, max_concurrency=2)
    assert server.most_open == 2
    assert [row.planned_s for row in one.rows] == pytest.approx([0, 0, 10, 10, 20, 20])
    assert [row.ttft_s() for row in one.rows] == pytest.approx([10] * 6)
    assert one.duration_s == pytest.approx(30)


def test_turns_follow_one_another_and_send_the_answers_back():
    server = SlowServer(first_s=3.0)
    talk = Conversation((Turn("a", 1, 1), Turn("b", 1, 2), Turn("c", 1, 1)), "system")
    _, one = load(server, [talk], [5.0])
    assert [call.said for call in server.calls] == [("a",), ("a", "1.0 ", "b"), ("a", "1.0 ", "b", "2.0 2.1 ", "c")]
    assert {call.system for call in server.calls} == {"system"}
    assert [row.planned_s for row in one.rows] == pytest.approx([5, 8, 11.5])
    assert [row.ttft_s() for row in one.rows] == pytest.approx([3, 3, 3])
    assert [row.turn for row in one.rows] == [0, 1, 2]


def test_a_turn_that_fails_ends_its_conversation_and_no_other():
    server = SlowServer()

    async def ask(call):
        if call.said == ("x", "1.0 ", "b"):
            raise FailedError("HTTP 500: broken")
        async for piece in server.ask(call):
            yield piece

    talks = [Conversation((Turn(name, 1, 1), Turn("b", 1, 1), Turn("c", 1, 1))) for name in "xy"]
    one = Load(ask, talks, [0.0, 100.0])
    assert virtual_time.run(one.run())
    assert [(row.conversation, row.turn, row.error) for row in one.rows] == [
        (0, 0, None),
        (0, 1, "HTTP 500: broken"),
        (1, 0, None),
        (1, 1, None),
        (1, 2, None),
    ]


def test_an_answer_that_takes_too_long_has_failed():
    _, one = load(SlowServer(first_s=1.0, next_s=30.0), one_turn(1, max_tokens=5), [0.0], timeout_s=60.0)
    assert one.rows[0].error == "no whole answer within 60 s"
    assert not one.rows[0].is_complete
    assert one.duration_s == pytest.approx(60)


def test_an_answer_without_a_token_has_failed():
    _, one = load(SlowServer(), one_turn(1, max_tokens=0), [0.0])
    assert one.rows[0].error == "an answer without a token"


def test_an_interrupt_keeps_what_was_measured():
    server = SlowServer(first_s=4.0, next_s=0.0)
    one = Load(server.ask, one_turn(10), [float(n) for n in range(10)])

    async def interrupted():
        task = asyncio.create_task(one.run())
        await asyncio.sleep(6.5)
        task.cancel()
        return await task

    assert virtual_time.run(interrupted()) is False
    assert [row.is_complete for row in one.rows] == [True] * 3 + [False] * 4
    assert {row.error for row in one.rows} == {None}
    assert one.duration_s == pytest.approx(6.5)
    assert server.num_open == 0


def test_usage_counts_the_tokens_and_pieces_do_where_there_is_none():
    _, told = load(SlowServer(), one_turn(1, max_tokens=3), [0.0])
    _, untold = load(SlowServer(usage=False), one_turn(1, max_tokens=3), [0.0])
    assert (told.rows[0].num_output_tokens, told.rows[0].has_usage, told.rows[0].num_cached_tokens) == (3, True, 2)
    assert (untold.rows[0].num_output_tokens, untold.rows[0].has_usage) == (3, False)
    assert untold.rows[0].num_input_tokens is None


def test_each_end_is_told():
    ended = []
    load(SlowServer(), one_turn(3), [0.0, 5.0, 6.0], on_end=ended.append)
    assert [row.conversation for row in ended] == [0, 1, 2]
    assert all(row.is_complete for row in ended)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_are_asked_for(burstiness):
    times = arrival_times(random.Random(3), 20_000, 8.0, burstiness)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    # Of a gamma distribution with shape k, the deviation is mean / sqrt(k).
    assert statistics.stdev(gaps) * math.sqrt(burstiness) == pytest.approx(1 / 8, rel=0.05)


def test_infinite_burstiness_is_a_constant_gap_and_an_infinite_rate_is_at_once():
    assert arrival_times(random.Random(0), 4, 2.0, math.inf) == [0.0, 0.5, 1.0, 1.5]
    assert arrival_times(random.Random(0), 3, math.inf) == [0.0, 0.0, 0.0]


def test_arrivals_come_from_the_seed():
    first, again, other = (arrival_times(random.Random(seed), 9, 1.0) for seed in (1, 1, 2))
    assert first == again != other

"""How many guesses a step verifies: the choice that gives most tokens a second under the cost model."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from samebit.scheduler.drafts import AcceptanceEstimate, least_survival, worth

chances = st.lists(st.floats(0.01, 0.999), min_size=0, max_size=4)


@given(
    offers=st.lists(chances, min_size=1, max_size=4),
    num_others=st.integers(0, 50),
    token_cost=st.sampled_from([0.0, 0.01, 0.1, 0.5, 3.0]),
)
def test_the_choice_is_the_best_of_all_choices(offers, num_others, token_cost):
    survivals = [list(itertools.accumulate(offer, lambda a, b: a * b)) for offer in offers]
    num_rows, num_tokens = len(offers), len(offers) + num_others

    def rate(lengths):
        gained = num_rows + sum(sum(chain[:length]) for chain, length in zip(survivals, lengths, strict=True))
        return gained / (1 + token_cost * (num_tokens + sum(lengths)))

    least = least_survival(survivals, num_tokens, num_rows, token_cost)
    chosen = [len(worth(list(range(len(chain))), chain, least)) for chain in survivals]
    best = max(rate(lengths) for lengths in itertools.product(*(range(len(chain) + 1) for chain in survivals)))
    assert rate(chosen) >= best * (1 - 1e-9)


def test_where_tokens_cost_nothing_every_guess_is_verified():
    least = least_survival([[0.9, 0.01], [1e-6]], 2, 2, 0.0)
    assert worth([5, 6], [0.9, 0.01], least) == [5, 6]
    assert worth([7], [1e-6], least) == [7]


def test_speculation_turns_itself_down_in_a_crowded_step():
    counts = []
    for num_rows in (1, 4, 16, 64):
        offers = [[0.7, 0.5, 0.35, 0.25]] * num_rows
        counts.append(len(worth([1, 2, 3, 4], offers[0], least_survival(offers, num_rows, num_rows, 0.1))))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 3
    assert counts[-1] == 0


def test_an_estimate_follows_what_happens_and_forgets_when_nothing_does():
    estimate = AcceptanceEstimate()
    fresh = estimate.rate
    for _ in range(30):
        estimate.learn(4, 0)
    assert estimate.rate < 0.2
    for _ in range(200):
        estimate.learn(0, 0)
    assert abs(estimate.rate - fresh) < 0.02
    for _ in range(30):
        estimate.learn(4, 4)
    assert estimate.rate > 0.9


def test_a_drafters_opinion_counts_instead_of_the_estimate():
    estimate = AcceptanceEstimate()
    assert estimate.survivals([0.5, 0.5]) == [0.5, 0.25]
    assert estimate.survivals([1.0, 0.5]) == [estimate.rate, estimate.rate * 0.5]

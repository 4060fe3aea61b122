"""How many guesses a step verifies: the choice that gives most tokens a second under the cost model."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from samebit.scheduler.drafts import AcceptanceEstimate, drafting_pays, least_survival, worth

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


@given(
    rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3),
    most=st.integers(1, 4),
    token_cost=st.sampled_from([0.01, 0.1, 0.5]),
    draft_cost=st.sampled_from([0.0, 0.05, 0.4, 2.0]),
)
def test_the_device_guesses_if_the_best_choice_of_guesses_pays_for_them(rates, most, token_cost, draft_cost):
    chains = [[rate ** (place + 1) for place in range(most)] for rate in rates]
    plain = len(rates) / (1 + token_cost * len(rates))
    best = max(
        (len(rates) + sum(sum(chain[:n]) for chain, n in zip(chains, lengths, strict=True)))
        / (1 + token_cost * (len(rates) + sum(lengths)) + draft_cost * len(rates))
        for lengths in itertools.product(range(most + 1), repeat=len(rates))
        if any(lengths)
    )
    found = drafting_pays(rates, most, len(rates), token_cost, draft_cost)
    assert found == (best > plain) or abs(best - plain) < 1e-9 * plain


def test_nobody_guesses_in_a_crowd_or_in_vain():
    assert drafting_pays([0.8], 7, 1, 0.15, 0.5)
    assert not drafting_pays([0.8] * 14, 7, 14, 0.15, 0.5)
    assert not drafting_pays([0.05], 7, 1, 0.15, 0.5)
    assert not drafting_pays([], 7, 100, 0.15, 0.0)
    assert drafting_pays([0.8] * 14, 7, 14, 0.0, 0.0)

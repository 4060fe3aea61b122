"""Bias and penalties as edits of logits: what the formula of docs/sampling.md says, of the request's own tokens only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.plan import BANNED_LOGIT
from samebit.core.request import Request, SamplingParams
from samebit.scheduler.edits import LogitRules

tokens = st.integers(0, 9)
penalties = st.floats(-2, 2)


def rules_of(prompt=(1, 2), **params):
    request = Request(request_id="r", prompt_token_ids=list(prompt), params=SamplingParams(**params), seed=0)
    return LogitRules.of(request)


def as_dict(edits):
    pairs = zip(edits.penalties, edits.shifts, strict=True)
    return dict(zip(edits.token_ids, pairs, strict=True))


def test_a_request_that_asks_for_nothing_has_no_rules():
    assert rules_of() is None
    assert rules_of(logit_bias={}) is None


def test_each_penalty_counts_what_it_says():
    output = [5, 5, 1]
    assert as_dict(rules_of(presence_penalty=1.5).edits(output)) == {5: (1.0, -1.5), 1: (1.0, -1.5)}
    assert as_dict(rules_of(frequency_penalty=0.5).edits(output)) == {5: (1.0, -1.0), 1: (1.0, -0.5)}
    assert as_dict(rules_of(repetition_penalty=1.3).edits(output)) == dict.fromkeys((1, 2, 5), (1.3, 0.0))
    assert as_dict(rules_of(logit_bias={7: 2.0}).edits(output)) == {7: (1.0, 2.0)}


@given(
    prompt=st.lists(tokens, min_size=1),
    output=st.lists(tokens),
    presence=penalties,
    frequency=penalties,
    bias=st.dictionaries(tokens, penalties),
    banned=st.sets(tokens),
)
def test_a_token_has_one_edit_which_adds_up_all_that_concerns_it(prompt, output, presence, frequency, bias, banned):
    params = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": 1.5}
    edits = rules_of(prompt, **params, logit_bias=bias).edits(output, banned)
    assert sorted(edits.token_ids) == sorted({*prompt, *output, *bias, *banned})
    for token, (penalty, found) in as_dict(edits).items():
        count = output.count(token)
        assert penalty == (1.5 if token in prompt or count else 1.0)
        shift = bias.get(token, 0.0) - presence * (count > 0) - frequency * count
        assert found == pytest.approx(BANNED_LOGIT if token in banned else shift, abs=1e-9)

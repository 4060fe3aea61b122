"""Bias and penalties as edits of logits: what the formula of docs/sampling.md says, of the request's own tokens only."""

import numpy as np
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
    assert len(set(edits.token_ids)) == len(edits.token_ids), "a token is edited once"
    pairs = zip(edits.penalties, edits.shifts, strict=True)
    return dict(zip(edits.token_ids, pairs, strict=True))


def edits_behind(rules, output, banned=()):
    """The edits of the token behind `output`, and the same if any of its last tokens are guesses."""
    taken = []
    for token in output:
        taken.append(as_dict(rules.edits(output[len(taken) :], banned)))
        rules.take(token)
    found = as_dict(rules.edits((), banned))
    assert all(edits == found for edits in taken)
    return found


def fp32(x):
    return float(np.float32(x))


def test_a_request_that_asks_for_nothing_has_no_rules():
    assert rules_of() is None
    assert rules_of(logit_bias={}) is None


def test_each_penalty_counts_what_it_says():
    output = [5, 5, 1]
    assert edits_behind(rules_of(presence_penalty=1.5), output) == {5: (1.0, -1.5), 1: (1.0, -1.5)}
    assert edits_behind(rules_of(frequency_penalty=0.5), output) == {5: (1.0, -1.0), 1: (1.0, -0.5)}
    assert edits_behind(rules_of(repetition_penalty=1.3), output) == dict.fromkeys((1, 2, 5), (fp32(1.3), 0.0))
    assert edits_behind(rules_of(logit_bias={7: 2.0}), output) == {7: (1.0, 2.0)}


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
    edits = edits_behind(rules_of(prompt, **params, logit_bias=bias), output, banned)
    assert edits.keys() == {*prompt, *output, *bias, *banned}
    for token, (penalty, found) in edits.items():
        count = output.count(token)
        assert penalty == (1.5 if token in prompt or count else 1.0)
        shift = bias.get(token, 0.0) - presence * (count > 0) - frequency * count
        assert found == fp32(BANNED_LOGIT if token in banned else shift)

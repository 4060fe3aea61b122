"""Whatever a client sends, it gets an answer or a named mistake, never an internal error."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebit.server.request_models import ChatBody, CompletionBody

edges = st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 0.0, 0.5, -0.5, 1e300, 1.5])
scalars = st.none() | st.booleans() | edges | st.integers(-3, 200) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "?"])
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=20) | parts | st.none()}), min_size=1, max_size=3
)


def bodies(model, **usual):
    """Mostly sensible bodies: some fields with any value, the required one usually right, short answers."""
    names = sorted(set(model.model_fields) - {"max_tokens", "max_completion_tokens"})
    some = st.dictionaries(st.sampled_from(names), values, max_size=3)
    return st.builds(lambda usual, some: {**usual, **some, "max_tokens": 2}, st.fixed_dictionaries(usual), some)


requests = st.tuples(
    st.just("/v1/completions"), bodies(CompletionBody, prompt=st.text(min_size=1, max_size=20))
) | st.tuples(st.just("/v1/chat/completions"), bodies(ChatBody, messages=messages))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests)
def test_any_body_is_answered_or_refused_by_name(server, request):
    path, body = request
    status, headers, answer = server.post(path, body)
    if status == 200:
        is_stream = body.get("stream") is True
        assert headers["content-type"].startswith("text/event-stream" if is_stream else "application/json")
        return
    assert status in (400, 404), answer
    error = answer["error"]
    assert error["param"], error
    assert error["message"]

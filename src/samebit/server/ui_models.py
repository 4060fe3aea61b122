"""What the page asks for and gets, as JSON. Knows shapes only."""

import msgspec

from samebit.server.body import Body


class LookBody(Body):
    """POST /ui/api/cache and /ui/api/requests. `cache_salt`: the tenant that asks; `name`: the id of an answer, or a request's label."""

    cache_salt: str | None = None
    name: str | None = None


class Histogram(msgspec.Struct, frozen=True):
    """`buckets`: pairs of an upper bound (null: none) and how many values are not above it."""

    count: float
    sum: float
    buckets: list[tuple[float | None, float]]


class Dashboard(msgspec.Struct, frozen=True, kw_only=True):
    """The server now. `metrics` and `labelled` are the samples of /metrics by name, and by label value; `pools`: ids in each.

    `state`: "ok", or what /ready says; `is_admin`: whoever asked may administrate.
    """

    model: str
    version: str
    system_fingerprint: str
    profile: dict[str, str | int]
    state: str
    is_admin: bool
    max_model_len: int
    max_num_seqs: int
    num_speculative_tokens: int
    pools: dict[str, int]
    metrics: dict[str, float]
    labelled: dict[str, dict[str, float]]
    histograms: dict[str, Histogram]


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event in Chrome's trace format: `ts` and `dur` in microseconds."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: dict[str, int | float | str]


class Trace(msgspec.Struct, frozen=True, kw_only=True, rename={"events": "traceEvents", "unit": "displayTimeUnit"}):
    """A trace that Chrome and Perfetto open."""

    events: list[TraceEvent]
    unit: str = "ms"

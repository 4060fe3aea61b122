"""Bodies of the endpoints for operators, under sglang's field names where it has them. Knows shapes only."""

import msgspec
from pydantic import field_validator
from pydantic_core import PydanticCustomError

from samebit.server.body import Body


class AbortBody(Body):
    """POST /abort_request: the `id` of an answer, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class WeightsBody(Body):
    """POST /update_weights_from_disk. `abort_all_requests`: do not wait for open requests. The cache is always emptied."""

    model_path: str
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool | None = None

    @field_validator("load_format", "flush_cache")
    @classmethod
    def _asks_for_nothing(cls, value: object) -> object:
        if value not in (None, "auto", True):
            raise PydanticCustomError("unsupported", "not supported; leave it out")
        return value


class Aborted(msgspec.Struct, frozen=True):
    """How many requests were ended (a request is one sample)."""

    num_aborted: int


class Success(msgspec.Struct, frozen=True):
    """It was done."""

    success: bool
    message: str


class UpdatedWeights(msgspec.Struct, frozen=True):
    """Other weights are served from now on."""

    success: bool
    message: str
    weight_version: str
    system_fingerprint: str
    num_aborted: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_model_len: int
    vocab_size: int
    weight_version: str
    system_fingerprint: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine is, in sglang's fields. `token_usage`: of the fullest page pool."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float


class TotalLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The same over all engines, of which there is one."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """`timestamp` is ISO 8601, UTC."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: TotalLoad

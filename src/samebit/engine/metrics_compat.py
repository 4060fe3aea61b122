"""Our metrics under the names that dashboards and routers for sglang and vLLM look for. Knows names and labels only."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_OURS = "samebit:"

# Ours, sglang's, vLLM's; counters without the `_total` that they are shown with. An older name of vLLM's stands on many boards.
_NAMES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("num_running_reqs", ("num_running_reqs",), ("num_requests_running",)),
    ("num_queue_reqs", ("num_queue_reqs",), ("num_requests_waiting",)),
    ("token_usage", ("token_usage",), ("kv_cache_usage_perc", "gpu_cache_usage_perc")),
    ("full_token_usage", ("full_token_usage",), ()),
    ("swa_token_usage", ("swa_token_usage",), ()),
    ("conv_usage", ("mamba_usage",), ()),
    ("prompt_tokens", ("prompt_tokens",), ("prompt_tokens", "prefix_cache_queries")),
    ("generation_tokens", ("generation_tokens",), ("generation_tokens",)),
    ("cached_tokens", ("cached_tokens",), ("prompt_tokens_cached", "prefix_cache_hits")),
    ("cache_hit_rate", ("cache_hit_rate",), ()),
    ("gen_throughput", ("gen_throughput",), ()),
    ("time_to_first_token_seconds", ("time_to_first_token_seconds",), ("time_to_first_token_seconds",)),
    ("inter_token_latency_seconds", ("inter_token_latency_seconds",), ("inter_token_latency_seconds",)),
    (
        "request_time_per_output_token_seconds",
        ("request_time_per_output_token_seconds",),
        ("request_time_per_output_token_seconds",),
    ),
    ("e2e_request_latency_seconds", ("e2e_request_latency_seconds",), ("e2e_request_latency_seconds",)),
    ("queue_time_seconds", ("queue_time_seconds",), ("request_queue_time_seconds",)),
    ("grammar_compilation_time_seconds", ("grammar_compilation_time_seconds",), ()),
    ("num_requests", ("num_requests",), ("request_success",)),
    ("num_aborted_requests", ("num_aborted_requests",), ()),
    ("num_retracted_reqs", ("num_retracted_reqs",), ()),
    ("num_preemptions", (), ("num_preemptions",)),
    ("admission_rejections", (), ("admission_rejections",)),
    ("evicted_tokens", ("evicted_tokens",), ()),
    ("eviction_duration_seconds", ("eviction_duration_seconds",), ()),
    ("spec_accept_length", ("spec_accept_length",), ()),
    ("spec_accept_rate", ("spec_accept_rate",), ()),
    ("spec_decode_num_drafts", ("spec_verify_calls",), ("spec_decode_num_drafts",)),
    ("spec_decode_num_draft_tokens", (), ("spec_decode_num_draft_tokens",)),
    ("spec_decode_num_accepted_tokens", (), ("spec_decode_num_accepted_tokens",)),
    ("spec_decode_num_accepted_tokens_per_pos", (), ("spec_decode_num_accepted_tokens_per_pos",)),
)
_LABELS = {
    "sglang": {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"},
    "vllm": {"engine": "0"},
}
COMPATIBLE = tuple(_LABELS)


def renamed(metrics: Iterable[Metric], servers: Sequence[str]) -> Iterator[Metric]:
    """Copies of those of `metrics` that `servers` have, too, under their names and with their labels."""
    known = {name: {"sglang": sglang, "vllm": vllm} for name, sglang, vllm in _NAMES}
    for metric in metrics:
        names = known.get(metric.name.removeprefix(_OURS), {})
        for server in servers:
            for name in names.get(server, ()):
                yield _copy(metric, f"{server}:{name}", _LABELS[server])


def _copy(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        Sample(
            name + sample.name.removeprefix(metric.name),
            {**sample.labels, **labels},
            sample.value,
            sample.timestamp,
            sample.exemplar,
        )
        for sample in metric.samples
    ]
    return copy

"""Prometheus metrics of a server, under the names that dashboards for this kind of server know.

Knows numbers and label values. Does not know where they come from; keeps no process-wide registry.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from samebit.core.request import EngineOutput
from samebit.engine.metrics_compat import COMPATIBLE, renamed

_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10),
    *(20, 40, 60, 80, 100, 200, 400),
)
_NEXT_TOKEN_BUCKETS_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
_COMPILATION_BUCKETS_S = (*(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),)
_EVICTION_BUCKETS_S = (*(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1),)
_QUEUE_BUCKETS_S = (0.0, *_FIRST_TOKEN_BUCKETS_S)
_REQUEST_BUCKETS_S = (*(0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200),)

# Totals of speculation: the engine's name for them, ours, and what they count.
_SPECULATION_TOTALS = (
    ("num_drafts", "spec_decode_num_drafts", "Rows of guesses that were verified"),
    ("num_draft_tokens", "spec_decode_num_draft_tokens", "Tokens guessed"),
    ("num_accepted_tokens", "spec_decode_num_accepted_tokens", "Guesses that were accepted"),
)
_AT_POSITION = "num_accepted_tokens_at_"
_MISSES = "misses_"
_AUDITS, _DIFFERENCES = "audits_", "audit_differences_"

# Engine totals: its name for them, ours, and what they count.
_ENGINE_TOTALS = (
    ("num_preemptions", "num_preemptions", "Requests that were put back into the queue"),
    ("num_published", "published_checkpoints", "Checkpoints put into the prefix cache"),
    ("num_refused_checkpoints", "refused_checkpoints", "Checkpoints not published: incomplete"),
    ("num_damaged_resumes", "damaged_resumes", "Resumes from a checkpoint found damaged"),
    ("evicted_tokens", "evicted_tokens", "Cached tokens that were evicted"),
    ("failed_steps", "failed_steps", "Steps that ended their requests with an error"),
    ("num_grammar_masks", "grammar_masks", "Masks of allowed tokens that grammars made"),
    ("grammar_mask_seconds", "grammar_mask_seconds", "Time of the engine spent on them"),
    ("audited_tokens", "audit_tokens", "Tokens that the shadow audit compared and found equal"),
    ("audits_mismatch", "audit_mismatches", "Requests whose second run gave other bits"),
    ("num_weight_updates", "weight_updates", "Times that other weights were loaded"),
)


class ServerMetrics:
    """Owner of the metrics of one server. `compatible` names servers under whose names they are shown, too."""

    def __init__(self, model_name: str, compatible: Sequence[str] = ()) -> None:
        assert set(compatible) <= set(COMPATIBLE), "names are checked first"
        self._compatible = compatible
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, cached ones included")
        self._cached = self._counter("cached_tokens", "Prompt tokens taken from the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._aborted = self._counter("num_aborted_requests", "Requests ended by their client")
        self._finished = Counter(
            "samebit:num_requests",
            "Requests that ended",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._losses = self._counter("engine_losses", "Times that the engine process was lost")
        self._dropped_spans = self._counter("dropped_spans", "Spans that the traces endpoint did not take")
        self._refused = Counter(
            "samebit:admission_rejections",
            "Requests refused at the door, each once whatever its samples",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._next_token = self._histogram("inter_token_latency_seconds", "Time between tokens", _NEXT_TOKEN_BUCKETS_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens", _NEXT_TOKEN_BUCKETS_S
        )
        self._queue = self._histogram("queue_time_seconds", "Arrival to the first step", _QUEUE_BUCKETS_S)
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _REQUEST_BUCKETS_S)
        self._compilation = self._histogram(
            "grammar_compilation_time_seconds", "Time to compile a grammar", _COMPILATION_BUCKETS_S
        )
        self._eviction = self._histogram(
            "eviction_duration_seconds", "Time to let a checkpoint go from the prefix cache", _EVICTION_BUCKETS_S
        )
        self._engine = _EngineStats(model_name)
        self.registry.register(self._engine)

    def admitted(self, waits_s: Sequence[float]) -> None:
        """The first step of some requests began so long after they arrived."""
        for wait_s in waits_s:
            self._queue.observe(wait_s)

    def compiled(self, times_s: Sequence[float]) -> None:
        """Some grammars took so long to compile."""
        for time_s in times_s:
            self._compilation.observe(time_s)

    def evicted(self, times_s: Sequence[float]) -> None:
        """It took so long each time to make room in the prefix cache."""
        for time_s in times_s:
            self._eviction.observe(time_s)

    def first_token(self, wait_s: float, num_prompt_tokens: int, output: EngineOutput) -> None:
        """A request got its first token `wait_s` after it arrived."""
        self._first_token.observe(wait_s)
        self._prompt.inc(num_prompt_tokens)
        self._cached.inc(output.num_cached_tokens)
        self._engine.count_prompt(num_prompt_tokens, output.num_cached_tokens)

    def next_tokens(self, wait_s: float, count: int) -> None:
        """A request got `count` tokens, `wait_s` after the one before."""
        for _ in range(count):
            self._next_token.observe(wait_s / count)

    def per_token(self, mean_s: float) -> None:
        """A request has ended whose tokens came `mean_s` after one another on average."""
        self._per_token.observe(mean_s)

    def generated(self, count: int) -> None:
        """`count` tokens were generated."""
        self._generated.inc(count)

    def finish(self, reason: str, count: int, latency_s: float | None = None) -> None:
        """`count` requests ended for `reason`, `latency_s` after they arrived."""
        self._finished.labels(self._model_name, reason).inc(count)
        if reason == "abort":
            self._aborted.inc(count)
        if latency_s is not None:
            self._request.observe(latency_s)

    def refuse(self, reason: str) -> None:
        """A request, whatever the number of its samples, was turned away for `reason` before the engine saw it."""
        self._refused.labels(self._model_name, reason).inc()

    def engine_lost(self) -> None:
        """The engine process has died."""
        self._losses.inc()

    def drop_spans(self, count: int) -> None:
        """`count` spans of requests are lost. May be called in any thread."""
        self._dropped_spans.inc(count)

    def set_engine_stats(self, values: dict[str, float], now_s: float) -> None:
        """Take the newest gauges and totals of the engine."""
        self._engine.take(values, now_s)

    def load(self) -> dict[str, float]:
        """Rates of the engine: `gen_throughput` and `cache_hit_rate`."""
        return {"gen_throughput": self._engine.throughput, "cache_hit_rate": self._engine.hit_rate}

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        native = generate_latest(self.registry)
        if not self._compatible:
            return native
        others = CollectorRegistry()
        others.register(_Fixed([*renamed(self.registry.collect(), self._compatible)]))
        return native + generate_latest(others)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"samebit:{name}", text, ("model_name",), registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"samebit:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


class _Fixed(Collector):
    """Shows what it was given."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


class _EngineStats(Collector):
    """Shows the engine's own numbers, whose totals are kept by the engine, and rates of them."""

    def __init__(self, model_name: str) -> None:
        self.values: dict[str, float] = {}
        self.throughput = 0.0
        self._model_name = model_name
        self._taken_s = 0.0
        self._num_prompt = 0
        self._num_cached = 0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came from the prefix cache."""
        return self._num_cached / self._num_prompt if self._num_prompt else 0.0

    def take(self, values: dict[str, float], now_s: float) -> None:
        """The newest numbers; the time since those before gives the throughput."""
        gained = values.get("generation_tokens", 0) - self.values.get("generation_tokens", 0)
        self.throughput = max(gained, 0) / max(now_s - self._taken_s, 1e-3)
        self.values, self._taken_s = values, now_s

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """A prompt has been computed."""
        self._num_prompt += num_tokens
        self._num_cached += num_cached

    def collect(self) -> Iterator[Metric]:
        values = self.values
        yield self._gauge("num_running_reqs", "Running requests", values.get("num_running", 0))
        yield self._gauge("num_queue_reqs", "Waiting requests", values.get("num_waiting", 0))
        pools = {name.removeprefix("usage_"): value for name, value in values.items() if name.startswith("usage_")}
        conv = pools.pop("checkpoints", 0.0)
        full = pools.pop("full", 0.0)
        yield self._gauge("token_usage", "Use of the fullest page pool, 0 to 1", max([full, *pools.values()]))
        yield self._gauge("full_token_usage", "Use of the full-attention pages, 0 to 1", full)
        window = max(pools.values(), default=0.0)
        yield self._gauge("swa_token_usage", "Use of the sliding-window pages, 0 to 1", window)
        yield self._gauge("conv_usage", "Use of the convolution checkpoints, 0 to 1", conv)
        yield self._gauge("gen_throughput", "Tokens generated a second, lately", self.throughput)
        yield self._gauge("cache_hit_rate", "Share of prompt tokens from the prefix cache", self.hit_rate)
        yield self._gauge("num_retracted_reqs", "As num_preemptions_total", values.get("num_preemptions", 0))
        for key, name, text in _ENGINE_TOTALS:
            yield self._total(name, text, values.get(key, 0))
        yield self._by_label("cache_miss_reason", "Prompts that the cache had nothing of", "reason", _MISSES)
        yield self._by_label("audit_requests", "Requests that the shadow audit chose", "result", _AUDITS)
        yield self._by_label("audit_differences", "Mismatches, by what differed first", "kind", _DIFFERENCES)
        last_s = values.get("audit_last_mismatch_s", 0)
        yield self._gauge("audit_last_mismatch_timestamp_seconds", "When the last was found; 0: never", last_s)
        yield from self._speculation(values)

    def _speculation(self, values: dict[str, float]) -> Iterator[Metric]:
        guessed = values.get("num_draft_tokens", 0)
        rate = values.get("num_accepted_tokens", 0) / guessed if guessed else 0.0
        mean = values.get("mean_acceptance_length", 0)
        yield self._gauge("spec_accept_length", "Mean tokens of a row of guesses, its next token among them", mean)
        yield self._gauge("spec_accept_rate", "Share of guesses that were accepted", rate)
        for key, name, text in _SPECULATION_TOTALS:
            yield self._total(name, text, values.get(key, 0))
        yield self._by_label(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guesses that were accepted, by their place in the row",
            "position",
            _AT_POSITION,
        )

    def _by_label(self, name: str, text: str, label: str, prefix: str) -> Metric:
        """The totals that the engine calls by `prefix` and a value of `label`."""
        family = CounterMetricFamily(f"samebit:{name}", text, labels=("model_name", label))
        for key, count in self.values.items():
            if key.startswith(prefix):
                family.add_metric((self._model_name, key.removeprefix(prefix)), count)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"samebit:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"samebit:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

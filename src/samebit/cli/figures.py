"""A server's metrics as a few figures, and as a table. Knows metric names; does not know how they come about."""

import itertools
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from samebit.core.errors import SamebitError

Labels = tuple[tuple[str, str], ...]

_TIMEOUT_S = 5
_PREFIX = "samebit:"


@dataclass(frozen=True, slots=True)
class Look:
    """All samples of one moment: name, without the prefix, to labels to value."""

    at_s: float
    samples: dict[str, dict[Labels, float]]

    def value(self, name: str) -> float:
        """A sample, summed over its labels; 0 where there is none."""
        return sum(self.samples.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels, those that are not 0."""
        found = {dict(labels)[label]: value for labels, value in self.samples.get(name, {}).items()}
        return {key: value for key, value in found.items() if value}

    def buckets(self, name: str) -> dict[float, float]:
        """Observations of a histogram up to each of its bounds."""
        return {float(bound): count for bound, count in self._all(f"{name}_bucket", "le")}

    def _all(self, name: str, label: str) -> list[tuple[str, float]]:
        return [(dict(labels)[label], value) for labels, value in self.samples.get(name, {}).items()]


def fetch(url: str, api_key: str | None = None) -> Look:
    """Look at the metrics of the server at `url`. Raises SamebitError if there is none, or it wants another key."""
    if not url.startswith(("http://", "https://")):
        raise SamebitError(f"{url!r}: must begin with http:// or https://")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - checked above
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise SamebitError(f"{url} answers {error.code}: {error.reason}") from error
    except (OSError, ValueError) as error:
        raise SamebitError(f"{url} does not answer: {error}") from error
    return parse(text, time.monotonic())


def parse(text: str, at_s: float) -> Look:
    """What Prometheus' text format says."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX):
                name = sample.name.removeprefix(_PREFIX)
                samples.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = float(sample.value)
    return Look(at_s, samples)


def figures(now: Look, before: Look | None = None) -> dict[str, float | dict[str, float] | None]:
    """The figures of `top`. With an earlier look, rates and quantiles are of the time between.

    Times are in seconds; None where nothing was observed.
    """
    return {
        "running": now.value("num_running_reqs"),
        "waiting": now.value("num_queue_reqs"),
        "tokens_per_second": _rate("generation_tokens_total", now, before),
        "ttft_p50": quantile("time_to_first_token_seconds", 0.5, now, before),
        "ttft_p99": quantile("time_to_first_token_seconds", 0.99, now, before),
        "itl_p50": quantile("inter_token_latency_seconds", 0.5, now, before),
        "itl_p99": quantile("inter_token_latency_seconds", 0.99, now, before),
        "queue_time_p99": quantile("queue_time_seconds", 0.99, now, before),
        "cache_hit_rate": now.value("cache_hit_rate"),
        "accept_length": now.value("spec_accept_length"),
        "full_token_usage": now.value("full_token_usage"),
        "swa_token_usage": now.value("swa_token_usage"),
        "conv_usage": now.value("conv_usage"),
        "finished": now.by("num_requests_total", "finished_reason"),
        "rejected": now.by("admission_rejections_total", "reason"),
        "missed": now.by("cache_miss_reason_total", "reason"),
        "preemptions": now.value("num_preemptions_total"),
        "failed_steps": now.value("failed_steps_total"),
        "refused_checkpoints": now.value("refused_checkpoints_total"),
        "damaged_resumes": now.value("damaged_resumes_total"),
        "engine_losses": now.value("engine_losses_total"),
    }


def quantile(name: str, share: float, now: Look, before: Look | None = None) -> float | None:
    """A quantile of a histogram, as Prometheus estimates it: linear within a bucket; None without observations."""
    earlier = before.buckets(name) if before else {}
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(now.buckets(name).items())]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    for (low, below), (high, upto) in itertools.pairwise([(0.0, 0.0), *counts]):
        if upto >= wanted:
            return low if math.isinf(high) or upto == below else low + (high - low) * (wanted - below) / (upto - below)
    return None


def table(url: str, found: dict[str, float | dict[str, float] | None]) -> Table:
    """The figures for a reader."""
    shown = Table(title=url, show_header=False)
    for name, value in found.items():
        shown.add_row(name.replace("_", " "), _shown(name, value))
    return shown


def _rate(name: str, now: Look, before: Look | None) -> float:
    if before is None:
        return now.value("gen_throughput")
    return max(0.0, now.value(name) - before.value(name)) / max(now.at_s - before.at_s, 1e-3)


def _shown(name: str, value: float | dict[str, float] | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:g}" for key, count in value.items()) or "-"
    if name.endswith(("_p50", "_p99")):
        return f"{1000 * value:.1f} ms"
    if name.endswith(("_usage", "_rate")):
        return f"{100 * value:.0f} %"
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"

"""Engine settings, each documented and validated once. Knows no model and no machine."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from samebit.core.errors import ConfigError

MAX_DRAFTS = 32
MAX_LOOKUP = 64


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A seeded disturbance of the scheduler, for audits and tests: it may change the timing of work and nothing else.

    `chunk_sizes`: prefill is cut into these lengths in turn (empty: as the budget allows). `preempt_percent`: chance per
    running request and step of being preempted (the oldest never is). `max_rows`: most batch rows a step (0: no cap).
    `pad_tokens`, `pad_rows`: inert tokens and rows added to each step's bucket. `shuffle_rows`: order rows by the seed.
    `spoil_percent`: chance per guess of being replaced by another token before it is verified.
    """

    seed: int = 0
    chunk_sizes: tuple[int, ...] = ()
    preempt_percent: int = 0
    max_rows: int = 0
    pad_tokens: int = 0
    pad_rows: int = 0
    shuffle_rows: bool = False
    spoil_percent: int = 0

    def validate(self) -> None:
        """Raise ConfigError naming the first field that is out of range."""
        if any(size < 1 for size in self.chunk_sizes):
            raise ConfigError(f"schedule.chunk_sizes={self.chunk_sizes}: each must be at least 1")
        for name in ("preempt_percent", "spoil_percent"):
            if not 0 <= getattr(self, name) <= 100:
                raise ConfigError(f"schedule.{name}={getattr(self, name)}: must be between 0 and 100")
        for name in ("max_rows", "pad_tokens", "pad_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"schedule.{name}={getattr(self, name)}: must not be negative")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who guesses tokens ahead, so that a step can verify several. It changes speed and nothing else.

    `method`: "ngram" looks up what followed the last tokens before, "mtp" asks the model's own draft heads, "dflash" and
    "dspark" a drafter with weights of its own, `model`: a folder or a hub name (None: the one bundled with the model).
    `num_speculative_tokens`: most guesses a step (None: 8 for "ngram", one for each draft head, a whole block).
    `prompt_lookup_min`, `prompt_lookup_max`: lengths of the suffixes that "ngram" looks up. `token_cost`: what one more token
    costs in a step, as a share of what a step costs without any (None: by the device); guesses that do not pay are not verified (0: all are). `draft_cost`:
    what guessing for one request costs on the device, as such a share (None: by the drafter's size); where it does not pay, nobody guesses.
    """

    method: Literal["ngram", "mtp", "dflash", "dspark"]
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    token_cost: float | None = None
    draft_cost: float | None = None

    @property
    def settled_token_cost(self) -> float:
        """`token_cost`, once it is settled what the device is."""
        assert self.token_cost is not None, "settings are settled first"
        return self.token_cost

    def validate(self) -> None:
        """Raise ConfigError naming the first field that is out of range."""
        if self.num_speculative_tokens is not None and not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens={self.num_speculative_tokens}: must be between 1 and {MAX_DRAFTS}"
            )
        if self.model == "":
            raise ConfigError(
                "speculative_config.model='': names no drafter; leave it out, or name a folder or a hub name"
            )
        if self.model is not None and self.method not in {"dflash", "dspark"}:
            raise ConfigError(
                f"speculative_config.model={self.model!r}: method {self.method!r} takes no drafter of its own"
            )
        if self.token_cost is not None and not 0 <= self.token_cost < float("inf"):
            raise ConfigError(f"speculative_config.token_cost={self.token_cost}: must be a number, at least 0")
        if self.draft_cost is not None and not 0 <= self.draft_cost < float("inf"):
            raise ConfigError(f"speculative_config.draft_cost={self.draft_cost}: must be a number, at least 0")
        if self.prompt_lookup_max > MAX_LOOKUP:
            raise ConfigError(
                f"speculative_config.prompt_lookup_max={self.prompt_lookup_max}: must be at most {MAX_LOOKUP}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min={self.prompt_lookup_min}: must be between 1 and "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )


def parse_settings(settings: dict[str, object]) -> EngineConfig:
    """An EngineConfig from settings by name; ConfigError names the one that is unknown or of a wrong type or value."""
    _check_choices("", EngineConfig, settings)
    speculative = settings.get("speculative_config")
    if isinstance(speculative, dict):
        _check_choices("speculative_config.", SpeculativeConfig, speculative)
        known = SpeculativeConfig.__struct_fields__
        for name, value in speculative.items():
            if name not in known:
                raise ConfigError(f"speculative_config.{name}={value!r}: not known; there are {', '.join(known)}")
        try:
            msgspec.convert(speculative, SpeculativeConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"speculative_config={speculative}: {error}") from error
    try:
        return msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine settings: {error}") from error


def _check_choices(prefix: str, kind: type[msgspec.Struct], settings: dict[str, object]) -> None:
    """Raise ConfigError for a value that is none of those that its field of `kind` names."""
    choices = {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}
    for name, value in settings.items():
        if name in choices and value not in choices[name]:
            raise ConfigError(f"{prefix}{name}={value!r}: must be one of {', '.join(map(repr, choices[name]))}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is set up.

    `device`: "auto" is a GPU if there is one. `dtype`: of activations, K and V; "auto" is fp32 on a CPU, and what the weights are
    stored as on a GPU. `max_model_len`: most tokens (prompt and output) of a request
    (None: the model's limit, or what the pools hold). `max_num_seqs`: most running requests.
    `max_num_batched_tokens`: most tokens a step. `page_size`: tokens a KV page. `checkpoint_interval`: a prefix-cache
    checkpoint is kept at multiples of it (a multiple of `page_size`). `num_pages`, `num_window_pages`,
    `num_checkpoints`: pool sizes (None: from `cache_bytes`). `cache_bytes`: memory to size the pools by (None: 1 GiB on a CPU,
    what `gpu_memory_utilization` of a GPU's memory leaves beside the weights and a step). `num_threads`: CPU threads (None: all
    cores). `graph`: "eager", "trace" (each step is recorded once for its sizes and replayed), "cuda" (CUDA graphs),
    all of the same bits; "auto" is "cuda" on a GPU. `capture`: CUDA graphs are captured at "start", or each at its first "use",
    which starts sooner and pauses for a moment then. `kernels`: "native" (compiled) or "torch" (pure torch) on a CPU,
    "triton" on a GPU, or "auto". `speculative_config`: who guesses tokens ahead (None:
    nobody). `async_scheduling`: plan the next step while one runs (None: on a GPU). `priority_aging_steps`: steps of waiting that weigh as much as one level of a request's priority. `audit_rate`: share of finished
    requests that are computed a second time, cold, and compared. `poison`: fill fresh and freed memory with NaN (tests).
    """

    model: str = "nano"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    page_size: int = 16
    checkpoint_interval: int = 256
    num_pages: int | None = None
    num_window_pages: int | None = None
    num_checkpoints: int | None = None
    cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    num_threads: int | None = None
    graph: Literal["auto", "eager", "trace", "cuda"] = "auto"
    capture: Literal["start", "use"] = "start"
    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    priority_aging_steps: int = 64
    audit_rate: float = 0.0
    poison: bool = False
    speculative_config: SpeculativeConfig | None = None
    async_scheduling: bool | None = None
    schedule: Schedule = Schedule()

    def validate(self) -> None:
        """Raise ConfigError naming the first setting that is out of range."""
        limits: dict[str, tuple[int | None, int]] = {
            "max_model_len": (self.max_model_len, 2),
            "max_num_seqs": (self.max_num_seqs, 1),
            "max_num_batched_tokens": (self.max_num_batched_tokens, 1),
            "page_size": (self.page_size, 1),
            "checkpoint_interval": (self.checkpoint_interval, 1),
            "num_pages": (self.num_pages, 2),
            "num_window_pages": (self.num_window_pages, 2),
            "num_checkpoints": (self.num_checkpoints, 1),
            "cache_bytes": (self.cache_bytes, 1),
            "num_threads": (self.num_threads, 1),
            "priority_aging_steps": (self.priority_aging_steps, 1),
        }
        for name, (value, low) in limits.items():
            if value is not None and value < low:
                raise ConfigError(f"{name}={value}: must be at least {low}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be above 0 and at most 1")
        if not 0 <= self.audit_rate <= 1:
            raise ConfigError(f"audit_rate={self.audit_rate}: must be between 0 and 1")
        if self.checkpoint_interval % self.page_size:
            raise ConfigError(
                f"checkpoint_interval={self.checkpoint_interval}: must be a multiple of page_size ({self.page_size})"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs}: must not exceed max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.speculative_config is not None:
            self.speculative_config.validate()
        self.schedule.validate()

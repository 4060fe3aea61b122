"""What an engine shows of itself when it is asked: its prefix cache, and how its latest requests came about.

Plain values for the HTTP process. Token ids are only in them where whoever asks may read them; request ids and salts never are.
"""

from typing import Literal

import msgspec

from samebit.core.request import MissReason

CheckpointName = Literal["grid", "prompt_end", "fork", "response_end", "preempted"]
Subject = Literal["cache", "requests"]
Kind = Literal["prefill", "decode", "verify", "publish"]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks at what. `is_admin`: may see every tenant, and texts. `salt`: the tenant that whoever looks is (None: says nothing).

    `name`: the id of an answer, or the label of a request; None: the latest.
    """

    subject: Subject
    is_admin: bool
    salt: str | None = None
    name: str | None = None


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """State that a request can resume from: `window_pages`, how many of each window, and the inputs of the convolutions.

    `num_hits`: resumes from it.
    """

    kind: CheckpointName
    num_hits: int
    is_in_use: bool
    window_pages: dict[str, int]


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` .. `start + num_tokens` of a path, up to the next checkpoint or fork; `parent` and `tenant` are indices (-1: none).

    `num_hits`: resumes from it and from all below. `token_ids` and `text`: the first of its tokens, where they may be read (the text
    is for the HTTP process to add). `has_full_pages`: the pages of full attention are there (False: the model has none).
    """

    parent: int
    tenant: int
    start: int
    num_tokens: int
    num_hits: int
    has_full_pages: bool
    checkpoint: CheckpointView | None
    token_ids: list[int] = []
    text: str | None = None


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached under one salt. `label`: "" without a salt, else a name that tells nothing of it. `is_shown`: its spans are."""

    label: str
    num_tokens: int
    num_checkpoints: int
    is_shown: bool


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request resumed: at token `num_attached` of the first `num_matched` that were cached, of `num_possible` at most.

    `miss_reason`: why it resumed nowhere, as metrics and answers say it; None where it did, or where there is no cache.
    """

    num_attached: int
    num_matched: int
    num_possible: int
    miss_reason: MissReason | None


class CacheView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prefix tree, parents first. `is_cut`: it is larger than what is shown.

    `attachment` is that of the request that was asked for; `attached_span` and `matched_span` are where its tokens end (-1: nowhere, by
    now or ever).
    """

    page_size: int
    checkpoint_interval: int
    tenants: list[TenantView]
    spans: list[SpanView]
    is_cut: bool
    attachment: Attachment | None = None
    attached_span: int = -1
    matched_span: int = -1


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """A request's part of one step, or of `num_steps` of the same kind. Seconds since the request arrived.

    `first`: position of the first token; guesses are among `num_tokens`; `num_drawn` tokens were drawn.
    """

    kind: Kind
    start_s: float
    end_s: float
    first: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    num_drawn: int
    num_steps: int = 1


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """How one request came about. `arrived_s` is in seconds since 1970, the others since then; None: not yet.

    `label`: a name that does not help to abort it; `tenant` as in TenantView.
    """

    label: str
    tenant: str
    arrived_s: float
    admitted_s: float | None
    ended_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_drawn_tokens: int
    finish_reason: str | None
    attachment: Attachment | None
    steps: list[StepView]


class RequestsView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The latest requests, the newest last; `num_hidden` more are those of other tenants."""

    requests: list[RequestView]
    num_hidden: int = 0


View = CacheView | RequestsView

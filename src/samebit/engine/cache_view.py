"""The prefix cache as a tree of spans, and where a request attached to it. Reads the state manager, changes nothing."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from samebit.engine.views import (
    Attachment,
    CacheView,
    CheckpointName,
    CheckpointView,
    Look,
    SpanView,
    TenantView,
)
from samebit.scheduler.misses import Admission
from samebit.state.manager import StateManager
from samebit.state.nodes import Checkpoint, CheckpointKind, Node

MAX_NODES = 1 << 14
MAX_SPANS = 1 << 10
MAX_SPAN_TOKENS = 64
_KINDS: dict[CheckpointKind, CheckpointName] = {
    CheckpointKind.GRID: "grid",
    CheckpointKind.PROMPT_END: "prompt_end",
    CheckpointKind.FORK: "fork",
    CheckpointKind.RESPONSE_END: "response_end",
    CheckpointKind.PREEMPTED: "preempted",
}
_SECRET = secrets.token_bytes(16)


def label_of(name: str) -> str:
    """A short name for a request id or a salt from which neither can be told, the same while this process lives; "" for ""."""
    return hashlib.blake2b(name.encode(), key=_SECRET, digest_size=5).hexdigest() if name else ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request attached, and the last of its pages that were cached then."""

    attachment: Attachment
    attached: Node | None
    matched: Node | None


def place_of(admission: Admission, page_size: int) -> Place:
    """Where a request resumed that has just been admitted."""
    path, num_pages = admission.path, admission.num_cached // page_size
    attachment = Attachment(
        num_attached=admission.num_cached,
        num_matched=len(path) * page_size,
        num_possible=admission.num_possible,
        miss_reason=admission.miss_reason,
    )
    return Place(attachment, path[num_pages - 1] if num_pages else None, path[-1] if path else None)


def cache_view(manager: StateManager, look: Look, place: Place | None, interval: int) -> CacheView:
    """What `look` may see of the cache, with the `place` of a request in it."""
    places = [] if place is None else [place.attached, place.matched]
    windows = [str(group.window) for group in manager.geometry.layout.groups]
    walk = _Walk(windows, {id(node) for node in places if node is not None})
    tenants: list[TenantView] = []
    for root in manager.tree.roots():
        salt = root.namespace.partition(":")[2]
        is_own = look.salt is not None and salt == look.salt
        is_shown = look.is_admin or is_own or not salt
        # Texts are for the operator, and for whoever knows the salt they are kept under.
        may_read = look.is_admin or (is_own and bool(salt))
        totals = walk.take(root, len(tenants), is_shown=is_shown, may_read=may_read)
        tenants.append(
            TenantView(label=label_of(salt), num_tokens=totals[0], num_checkpoints=totals[1], is_shown=is_shown)
        )
    attached, matched = (-1 if node is None else walk.found.get(id(node), -1) for node in (places or [None, None]))
    return CacheView(
        page_size=manager.geometry.page_size,
        checkpoint_interval=interval,
        tenants=tenants,
        spans=walk.spans_with_hits(),
        is_cut=walk.is_cut,
        attachment=None if place is None else place.attachment,
        attached_span=attached,
        matched_span=matched,
    )


@dataclass(slots=True)
class _Walk:
    """Owner of the spans found so far. `windows`: of each page group; `wanted`: ids of nodes whose spans are to be noted in `found`."""

    windows: list[str]
    wanted: Collection[int]
    spans: list[SpanView] = field(default_factory=list)
    found: dict[int, int] = field(default_factory=dict)
    num_nodes: int = 0
    is_cut: bool = False

    def take(self, root: Node, tenant: int, *, is_shown: bool, may_read: bool) -> tuple[int, int]:
        """Add all spans below `root` if they are shown; return how many tokens and checkpoints there are."""
        num_tokens = num_checkpoints = 0
        pending = [(node, -1) for node in root.children.values()]
        while pending:
            node, parent = pending.pop()
            run = _run(node)
            self.num_nodes += len(run)
            if self.num_nodes > MAX_NODES or (is_shown and len(self.spans) >= MAX_SPANS):
                self.is_cut = True
                break
            last = run[-1]
            num_tokens += last.num_tokens - node.num_tokens + len(node.key)
            num_checkpoints += last.checkpoint is not None
            here = -1
            if is_shown:
                here = len(self.spans)
                self._note(run, here)
                self.spans.append(self._span(run, parent, tenant, may_read=may_read))
            pending += [(child, here) for child in last.children.values()]
        return num_tokens, num_checkpoints

    def spans_with_hits(self) -> list[SpanView]:
        """All spans, with the hits below them counted."""
        hits = [span.num_hits for span in self.spans]
        for index in range(len(hits) - 1, -1, -1):
            parent = self.spans[index].parent
            if parent >= 0:
                hits[parent] += hits[index]
        return [msgspec.structs.replace(span, num_hits=count) for span, count in zip(self.spans, hits, strict=True)]

    def _note(self, run: list[Node], here: int) -> None:
        for node in run if self.wanted else ():
            if id(node) in self.wanted:
                self.found[id(node)] = here

    def _span(self, run: list[Node], parent: int, tenant: int, *, may_read: bool) -> SpanView:
        first, last = run[0], run[-1]
        size = len(first.key)
        tokens: list[int] = []
        for node in run[: -(-MAX_SPAN_TOKENS // size)] if may_read else ():
            tokens += node.key
        start = first.num_tokens - size
        return SpanView(
            parent=parent,
            tenant=tenant,
            start=start,
            num_tokens=last.num_tokens - start,
            num_hits=last.checkpoint.num_hits if last.checkpoint else 0,
            has_full_pages=last.page is not None,
            checkpoint=self._checkpoint(last.checkpoint) if last.checkpoint else None,
            token_ids=tokens[:MAX_SPAN_TOKENS],
        )

    def _checkpoint(self, checkpoint: Checkpoint) -> CheckpointView:
        return CheckpointView(
            kind=_KINDS[checkpoint.kind],
            num_hits=checkpoint.num_hits,
            is_in_use=checkpoint.pins > 0,
            window_pages={self.windows[group]: len(pages) for group, pages in checkpoint.windows.items()},
        )


def _run(node: Node) -> list[Node]:
    """`node` and what follows it without a fork, up to the first checkpoint."""
    run = [node]
    while node.checkpoint is None and len(node.children) == 1 and len(run) <= MAX_NODES:
        (node,) = node.children.values()
        run.append(node)
    return run

"""How deep a prompt was cached when it was admitted, and why nothing of it was. Knows requests and what is cached; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.core.request import MissReason
from samebit.scheduler.planning import match_limit
from samebit.scheduler.sequence import Sequence
from samebit.state.manager import StateManager
from samebit.state.nodes import Node


@dataclass(frozen=True, slots=True)
class Admission:
    """A request's first: it resumed at `num_cached` of its tokens, of `num_possible` at most. `path`: those of its pages that were cached
    then, so far as it may resume from them, checkpoint or not; `miss_reason`: why it resumed nowhere (None: it did, or there is no cache).
    """

    request_id: str
    num_cached: int
    num_possible: int
    path: list[Node]
    miss_reason: MissReason | None


def admission(sequence: Sequence, manager: StateManager) -> Admission:
    """That of `sequence`, whose `num_cached` is known."""
    name, num_cached = sequence.request.request_id, sequence.num_cached
    if not manager.enable_caching:
        return Admission(name, num_cached, 0, [], None)
    tokens, size = sequence.token_ids, manager.geometry.page_size
    path = manager.tree.walk(manager.namespace(sequence.request.cache_salt), tokens, len(tokens) - 1)
    num_pages = match_limit(sequence) // size
    reason = None if num_cached else _miss_reason(sequence, manager, path)
    return Admission(name, num_cached, num_pages * size, path[:num_pages], reason)


def _miss_reason(sequence: Sequence, manager: StateManager, path: list[Node]) -> MissReason:
    """The first of these that holds.

    `shorter_than_page`: no page of it is full before its last token. `prompt_logprobs`: its tokens must be scored.
    `effort_changed`: see Request. `window_evicted`: pages of full attention are cached, and the window and the convolution inputs
    that belonged to them had to go. `evicted`: it was cached once. `no_checkpoint`: its beginning is cached as that of other prompts,
    and it leaves them before the first place that one can resume from. `salt`: nothing is cached under its salt.
    `cold`: nobody has asked for it before, or not for long. Nothing of it depends on what is cached under other salts.
    """
    request, tokens, size = sequence.request, sequence.token_ids, manager.geometry.page_size
    if len(tokens) - 1 < size:
        return "shorter_than_page"
    if match_limit(sequence) < size:
        return "prompt_logprobs"
    if request.effort_changed:
        return "effort_changed"
    namespace = manager.namespace(request.cache_salt)
    pages = (tuple(tokens[start : start + size]) for start in range(0, (len(path) + 1) * size, size))
    gone = manager.evicted.depths(namespace, pages)
    if gone and gone[0] <= len(path):
        return "window_evicted"
    if gone:
        return "evicted"
    if path:
        return "no_checkpoint"
    return "salt" if request.cache_salt and not manager.tree.has(namespace) else "cold"

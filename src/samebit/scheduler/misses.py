"""Why a prompt found nothing in the prefix cache. Knows requests and what is cached; decides nothing."""

from __future__ import annotations

from samebit.core.request import MissReason
from samebit.scheduler.planning import match_limit
from samebit.scheduler.sequence import Sequence
from samebit.state.manager import StateManager


def miss_reason(sequence: Sequence, manager: StateManager) -> MissReason:
    """The first of these that holds.

    `shorter_than_page`: no page of it is full before its last token. `prompt_logprobs`: its tokens must be scored.
    `effort_changed`: see Request. `window_evicted`: pages of full attention are cached, but nowhere on them the window and
    the convolution inputs that belong to them. `evicted`: it was cached once. `salt`: nothing is cached under its salt.
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
    if manager.tree.walk(namespace, tokens, len(tokens) - 1):
        return "window_evicted"
    if (namespace, tuple(tokens[:size])) in manager.evicted:
        return "evicted"
    return "salt" if request.cache_salt and not manager.tree.has(namespace) else "cold"

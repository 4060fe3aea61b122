"""Which reasoning efforts there are, and when a conversation goes on with another, which moves all its tokens. Knows bodies, no tokens."""

import hashlib
from collections import OrderedDict

import msgspec

from samebit.core.errors import InvalidRequestError
from samebit.server.request_models import ChatBody

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_REMEMBERED = 4096
_MAX_SHOWN = 64


def check_effort(effort: object) -> None:
    """Raise InvalidRequestError for what is no effort: a template would show it to the model, whatever it is. None is one."""
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return
    if isinstance(effort, int | float) and not isinstance(effort, bool) and 0 <= effort <= 1:
        return
    names = ", ".join(map(repr, EFFORTS))
    raise InvalidRequestError(
        f"reasoning_effort={repr(effort)[:_MAX_SHOWN]}: must be one of {names}, or a number from 0 to 1",
        param="reasoning_effort",
    )


class EffortMemory:
    """Owner of the last effort of the latest conversations, each known by a hash of its salt and beginning.

    A template puts the effort before the conversation, so one that changes leaves nothing for the prefix cache to find.
    """

    def __init__(self) -> None:
        self._efforts: OrderedDict[bytes, str] = OrderedDict()

    def is_changed(self, body: ChatBody) -> bool:
        """Whether the conversation was had before with another effort; it is remembered with this one."""
        key, effort = _beginning(body), repr(_effort(body))
        before = self._efforts.get(key)
        self._efforts[key] = effort
        self._efforts.move_to_end(key)
        if len(self._efforts) > _MAX_REMEMBERED:
            self._efforts.popitem(last=False)
        return before is not None and before != effort


def _effort(body: ChatBody) -> object:
    if body.reasoning_effort is not None:
        return body.reasoning_effort
    return (body.chat_template_kwargs or {}).get("reasoning_effort")


def _beginning(body: ChatBody) -> bytes:
    """A hash of all messages up to the first of a user."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(body.cache_salt))
    for message in body.messages:
        # Half a surrogate pair is no text, but a client can send it.
        digest.update(repr((message.role, message.content)).encode("utf-8", "surrogatepass"))
        if message.role == "user":
            break
    return digest.digest()

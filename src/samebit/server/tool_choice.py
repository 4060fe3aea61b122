"""Which tools an answer may call, and which it must. Knows chat bodies and the tokens of the message format."""

from samebit.core.errors import InvalidRequestError
from samebit.core.reply import MessageFormat
from samebit.server.request_models import ChatBody
from samebit.server.tool_models import NamedTool


def check_choice(body: ChatBody, message_format: MessageFormat | None) -> None:
    """Raise InvalidRequestError for tools that this model cannot call, and for a choice that there is not."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        return
    if not _call_ids(message_format):
        raise InvalidRequestError("tools: the tokens of this model have none that begins a call", param="tools")
    if body.skip_special_tokens is False:
        raise InvalidRequestError(
            "tools: not with skip_special_tokens=false, which shows replies as they are", param="tools"
        )
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequestError(
            f"tool_choice: there is no tool {choice.function.name[:64]!r}; there are {', '.join(names)}"[:1000],
            param="tool_choice",
        )


def is_one_call(body: ChatBody) -> bool:
    """Whether the answer ends with its first call."""
    return bool(body.tools) and (body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool))


def banned_ids(body: ChatBody, message_format: MessageFormat | None) -> tuple[int, ...]:
    """Tokens that the answer may not have: with `tool_choice` none, those that begin a call. The tools are still in the prompt."""
    return _call_ids(message_format) if body.tools and body.tool_choice == "none" else ()


def _call_ids(message_format: MessageFormat | None) -> tuple[int, ...]:
    return () if message_format is None or message_format.call is None else (message_format.call,)

"""Renders chat messages to token ids with the checkpoint's Jinja template.

No message can forge a control token. While the template runs, each control token written in the
*template* is one lone surrogate code point, a character that valid text cannot contain. After
rendering, surrogates become token ids and all else is encoded as ordinary text. Messages pass
through the template as they are, so trimming, splitting or `tojson` need no special care.

A template that assembles a marker from pieces (`'<|message_' + role + '|>'`) leaves it spelled in
the rendered text. It is then rendered once more with the first and last character of every marker
masked in the messages: a marker still spelled is the template's own work and is taken as one.

Knows messages as plain dictionaries; does not know requests, tools or how answers are parsed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from samebit.core.errors import CheckpointError, InvalidRequestError
from samebit.engine.kept_turns import Message, around, completed, frame_of, kept_ids, with_stand_ins
from samebit.engine.tokenizer import Tokenizer, check_text

_FIRST_MARKER = 0xD800  # stand-ins of control tokens
_FIRST_MASK = 0xDF00  # stand-ins of single characters
_OWN_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_END = "\udfff"  # marks where a message that is to be continued ends


class ChatTemplate:
    """One template with its tokenizer. Immutable after construction."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`. `now` answers `strftime_now`; only templates that print a date ask.

        Raises CheckpointError if the template is not valid Jinja.
        """
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens()
        named = tokenizer.named_tokens
        # A vocabulary may list thousands of unused control tokens: those in sight come first.
        used = sorted(special, key=lambda text: text not in source and text not in named.values())
        used = used[: _FIRST_MASK - _FIRST_MARKER]
        self._id_of = {chr(_FIRST_MARKER + i): special[text] for i, text in enumerate(used)}
        self._marker_of = {text: marker for marker, text in zip(self._id_of, used, strict=True)}
        self._spelled = _any_of(sorted(special, key=len, reverse=True))
        edges = sorted({end for text in special for end in (text[0], text[-1])})
        self._mask = {ord(edge): chr(_FIRST_MASK + i) for i, edge in enumerate(edges)}
        self._unmask = {ord(mask): chr(edge) for edge, mask in self._mask.items()}
        self._named = {name: self._mark(text) for name, text in named.items()}
        environment = _environment(now)
        try:
            self._template = environment.from_string(self._mark(source))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation.

        `add_generation_prompt` opens the model's turn; `continue_final_message` instead leaves the
        last message, whose content must be text, unfinished. `variables` are further names for the
        template. The result of a tool in several parts of text is one text. A message of the assistant that has `token_ids` is these tokens, whatever else it says.
        Raises InvalidRequestError for text that is not Unicode, and where the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        for name in sorted(_OWN_NAMES & (variables or {}).keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs.{name}: has a field of its own", param=f"chat_template_kwargs.{name}"
            )
        for param, part in (("messages", list(messages)), ("tools", tools), ("chat_template_kwargs", variables)):
            try:
                document = json.dumps(part, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{param}: must be what JSON can say: {error}", param=param) from error
            check_text(document, param=param)
        messages = [_with_one_result(message) for message in messages]
        context = {**(variables or {}), "messages": messages, "tools": tools or None}
        context = {**self._named, **context, "add_generation_prompt": add_generation_prompt}
        kept = kept_ids(messages)
        if kept:
            return self._render_kept(context, kept, continue_final_message)
        return self._encode(self._marked(context, continue_final_message))

    def _render_kept(self, context: dict[str, Any], kept: dict[int, list[int]], continued: bool) -> list[int]:
        """Token ids where those of some messages are given."""
        messages = with_stand_ins(context["messages"], kept)
        text = self._marked({**context, "messages": messages}, continued)
        last = max(kept)
        stages = ((last, False), (last, True), (last + 1, False))
        frame = frame_of(
            *(
                self._marked({**context, "messages": messages[:count], "add_generation_prompt": is_open}, False)
                for count, is_open in stages
            )
        )
        first, *others = map(self._encode, around(text, frame, len(kept)))
        tail = self._encode(frame.tail)
        ids = first
        for index, other in zip(kept, others, strict=True):
            is_open = continued and index == len(messages) - 1
            ids += [*(kept[index] if is_open else completed(kept[index], tail)), *other]
        return ids

    def _marked(self, context: dict[str, Any], continued: bool) -> str:
        """The rendered text with stand-ins for control tokens."""
        text = self._run(context, continued)
        if self._spelled.search(text):
            masked = self._run(_map_text(context, self._mask), continued)
            if self._spelled.search(masked):
                text = self._mark(masked)
        return text

    def _mark(self, text: str) -> str:
        """Replace every control token spelled in `text` by its stand-in."""
        return self._spelled.sub(lambda found: self._marker_of.get(found[0], found[0]), text)

    def _run(self, context: dict[str, Any], continued: bool) -> str:
        if continued:
            context = {**context, "messages": _with_end_mark(context["messages"])}
        try:
            text = self._template.render(context)
        except InvalidRequestError:
            raise
        except Exception as error:  # whatever foreign code does with the caller's messages
            raise InvalidRequestError(
                f"the chat template does not accept these messages: {error}", param="messages"
            ) from error
        if not continued:
            return text
        if text.count(_END) != 1:
            raise InvalidRequestError(
                "the chat template does not show the final message as it is: it cannot be continued",
                param="continue_final_message",
            )
        return text[: text.index(_END)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split("([\ud800-\udeff])", text):
            if piece in self._id_of:
                ids.append(self._id_of[piece])
            elif piece:
                plain = piece.translate(self._unmask)
                ids += self._tokenizer.encode(plain, allow_special=False)
        return ids


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a checkpoint folder, or None if it has none.

    `chat_template.jinja` comes before `chat_template` in tokenizer_config.json, which is a string
    or a list of named templates, of which `default` is taken. Raises CheckpointError for a file
    that is not what it should be.
    """
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer)
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            return None
        source = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}.get("default")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: holds no readable chat template: {error}") from error
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """The dialect that published chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequestError(f"the chat template refuses the messages: {message}", param="messages")


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _map_text(value: Any, table: Mapping[int, str]) -> Any:  # Any: a JSON value
    """`value` with every string in it translated by `table`, keys too unless they are names."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else key.translate(table): _map_text(item, table) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_text(item, table) for item in value]
    return value


def _with_one_result(message: Message) -> Message:
    """A tool's result as one text: a template may make a message of each part, and a call has one result."""
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        return message  # what else it may be is the template's business
    return {**message, "content": "".join(map(str, texts))}


def _with_end_mark(messages: Sequence[Message]) -> list[Message]:
    last = messages[-1] if messages else {}
    content = last.get("content")
    if not isinstance(content, str):
        raise InvalidRequestError("the final message must have text content to be continued", param="messages")
    return [*messages[:-1], {**last, "content": content + _END}]

"""Assesses a trained model by generating with the engine: held-out loss, recall, tool calls, JSON answers, loops of completions.

Any model in Inkling's message format can be assessed on any prepared corpus, which is read as texts; dialogues are written with the
model's own tokenizer. All choices are seeded: a model, a corpus and a number of probes give one result.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as DialogueTokenizer

from samebit.core.errors import ConfigError
from samebit.core.request import CompletionOutput, SamplingParams
from samebit.engine.llm import LLM
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.models.checkpoint import read_json
from samebit.train.assessment import Answers, Assessment, Completions, HeldOutLoss, Recall, markdown
from samebit.train.dialogues import DialogueWriter, JsonProbe, Probe, ToolProbe
from samebit.train.heldout import HeldOutPackage, documents_stream, held_out_packages, measured, windows
from samebit.train.replies import called, is_loop, is_valid_call, only_message, parsed, same_json, satisfies
from samebit.train.tokens import DOCUMENT_START, SPECIAL_TOKENS, TokenStream, load_data
from samebit.train.words import Split

PROBES = 50
CONTEXTS = (512, 4096)
DISTANCES = (250, 500, 1000, 2000, 3000)
CORRECTIONS = (0, 1, 3)
COMPLETION_TOKENS = 256

_REPLY_TOKENS = 192
_PREFIX_TOKENS = (200, 600)
_PREFIX_CHARS = 6000

_log = logging.getLogger(__name__)


Verdict = tuple[bool, bool]
"""Whether an answer is exactly the expected one, and whether it is valid."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model, and what dialogues with it are made of: its tokenizer as the writer knows it, code and prose."""

    llm: LLM
    tokenizer: DialogueTokenizer
    code: TokenStream
    prose: Sequence[str]

    def writer(self, seed: int, split: Split = "probe") -> DialogueWriter:
        """Writes probes, in words that training has not seen unless `split` is "train"."""
        return DialogueWriter(self.tokenizer, self.code, self.prose, seed, split)

    def complete(self, prompts: Sequence[list[int]], max_tokens: int) -> list[CompletionOutput]:
        """The likeliest continuation of each prompt."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return [output.outputs[0] for output in self.llm.generate(list(prompts), params)]

    def ask(self, prompts: Sequence[list[int]], judges: Sequence[Callable[[list[int]], Verdict]]) -> Answers:
        """Count the answers to all prompts, each judged by its own judge."""
        replies = self.complete(prompts, _REPLY_TOKENS)
        verdicts = [judge(reply.token_ids) for judge, reply in zip(judges, replies, strict=True)]
        return Answers(
            count=len(replies),
            stopped=sum(reply.finish_reason == "stop" for reply in replies),
            exact=sum(exact for exact, _ in verdicts),
            valid=sum(valid for _, valid in verdicts),
        )


def assess(model: str, data_folder: Path, *, probes: int = PROBES, num_threads: int | None = None) -> Assessment:
    """Measure `model` on a prepared corpus: `probes` a recall cell and as many windows of code, four times that for all else.

    Contexts and distances that are too long for the model are left out. Raises ConfigError if the model has not the control
    tokens that dialogues are written with.
    """
    began = time.monotonic()
    data = load_data(data_folder)
    packages = held_out_packages(data_folder, data)
    # No two prompts have much in common, so a prefix cache would only cost time.
    llm = LLM(model, num_threads=num_threads, enable_prefix_caching=False)
    code = documents_stream(llm.get_tokenizer(), [text for package in packages for text in package.texts])
    subject = _Subject(llm, _dialogue_tokenizer(model), np.array(code, dtype=np.uint16), data.sentences)
    completions = _completions(subject, code_prefixes(packages, data.tokenizer, 4 * probes))
    recall = _recall(subject, probes)
    tools, familiar = (_tools(subject, 4 * probes, split) for split in ("probe", "train"))
    json_answers = _json_answers(subject, 4 * probes)
    held_out = _held_out(llm, packages, max(1, probes // len(packages)))
    return Assessment(
        model=Path(model).name,
        fingerprint=llm.info.system_fingerprint,
        profile=llm.info.profile,
        corpus=read_json(data_folder / "manifest.json")["digest"],
        probes=probes,
        seconds=time.monotonic() - began,
        held_out=held_out,
        recall=recall,
        tools=tools,
        familiar_tools=familiar,
        json=json_answers,
        completions=completions,
    )


def run(model: str, data_folder: Path, target: Path | None, *, probes: int, num_threads: int | None) -> str:
    """Assess, write the counts to `target` as JSON, and return them as Markdown. Raises ConfigError before it begins if it could not."""
    if target is not None and not target.parent.is_dir():
        raise ConfigError(f"{target}: its folder does not exist")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = assess(model, data_folder, probes=probes, num_threads=num_threads)
    if target is not None:
        found.write(target)
    return markdown(found)


def code_prefixes(packages: Sequence[HeldOutPackage], tokenizer: DialogueTokenizer, count: int) -> list[str]:
    """So many beginnings of code to complete: whole lines, 200 to 600 tokens of the corpus's tokenizer, with text behind them.

    They are a function of the corpus alone, so that all models complete the same. Raises ConfigError if its texts are too short.
    """
    rng = random.Random(f"prefixes {count}")
    found: list[str] = []
    for _ in range(100 * count):
        lines = rng.choice(rng.choice(packages).texts).split("\n")
        begin = rng.randrange(len(lines))
        token_ids = tokenizer.encode("\n".join(lines[begin:])[:_PREFIX_CHARS], add_special_tokens=False).ids
        length = rng.randint(*_PREFIX_TOKENS)
        # A line break belongs to the token behind it, an indent, so a prefix ends before one.
        prefix = tokenizer.decode(token_ids[:length]).rpartition("\n")[0].strip("\n")
        if len(token_ids) > length and len(tokenizer.encode(prefix).ids) >= _PREFIX_TOKENS[0]:
            found.append(prefix)
        if len(found) == count:
            return found
    raise ConfigError(
        f"{len(found)} of {count} prefixes of {_PREFIX_TOKENS[0]} tokens found: the held-out texts are too short"
    )


def judge_fact(tokenizer: Tokenizer, probe: Probe, token_ids: list[int]) -> Verdict:
    """Exact: the whole turn is the expected one, its end included. Valid: the value with its full stop is in it."""
    reply = tokenizer.decode(token_ids, skip_special_tokens=False)
    expected = tokenizer.decode(probe.token_ids[probe.reply[0] :], skip_special_tokens=False)
    return reply == expected, tokenizer.decode(probe.token_ids[slice(*probe.value)]) in reply


def judge_call(tokenizer: Tokenizer, probe: ToolProbe, token_ids: list[int]) -> Verdict:
    """Exact: the expected call. Valid: a call of a declared tool that satisfies its schema. Neither with anything else around it."""
    message = only_message(tokenizer, token_ids)
    return same_json(called(message), probe.call), is_valid_call(message, probe.tools)


def judge_json(tokenizer: Tokenizer, probe: JsonProbe, token_ids: list[int]) -> Verdict:
    """Exact: the expected value. Valid: JSON that satisfies the schema. Neither with anything else around it."""
    message = only_message(tokenizer, token_ids)
    value = parsed(message if message is not None and message.kind == "<|content_text|>" else None)
    return same_json(value, probe.expected), satisfies(value, probe.schema)


def _completions(subject: _Subject, prefixes: Sequence[str]) -> Completions:
    encode = subject.llm.get_tokenizer().encode
    prompts = [[DOCUMENT_START, *encode(prefix, allow_special=False)] for prefix in prefixes]
    most = min(COMPLETION_TOKENS, subject.llm.info.max_length - max(map(len, prompts)))
    replies = subject.complete(prompts, most)
    found = Completions(
        count=len(replies),
        tokens=most,
        loops=sum(is_loop(reply.token_ids) for reply in replies),
        stopped=sum(reply.finish_reason == "stop" for reply in replies),
    )
    _log.info("%d of %d completions loop", found.loops, found.count)
    return found


def _recall(subject: _Subject, count: int) -> list[Recall]:
    found = []
    for distance in DISTANCES:
        for num_corrections in CORRECTIONS:
            writer = subject.writer(1000 * distance + num_corrections)
            probes = [writer.probe(distance, num_corrections) for _ in range(count)]
            prompts = [probe.token_ids[: probe.reply[0]] for probe in probes]
            if max(map(len, prompts)) + _REPLY_TOKENS > subject.llm.info.max_length:
                continue
            judges = [partial(judge_fact, subject.llm.get_tokenizer(), probe) for probe in probes]
            cell = Recall(distance, num_corrections, subject.ask(prompts, judges))
            _log.info(
                "distance %d, %d corrections: %d of %d exact", distance, num_corrections, cell.answers.exact, count
            )
            found.append(cell)
    return found


def _tools(subject: _Subject, count: int, split: Split) -> Answers:
    writer = subject.writer(1, split)
    probes = [writer.tool_probe() for _ in range(count)]
    judges = [partial(judge_call, subject.llm.get_tokenizer(), probe) for probe in probes]
    found = subject.ask([probe.prompt for probe in probes], judges)
    _log.info("%s: %d of %d calls valid, %d exact", split, found.valid, found.count, found.exact)
    return found


def _json_answers(subject: _Subject, count: int) -> Answers:
    writer = subject.writer(2)
    probes = [writer.json_probe() for _ in range(count)]
    judges = [partial(judge_json, subject.llm.get_tokenizer(), probe) for probe in probes]
    found = subject.ask([probe.prompt for probe in probes], judges)
    _log.info("%d of %d JSON answers valid, %d exact", found.valid, found.count, found.exact)
    return found


def _held_out(llm: LLM, packages: Sequence[HeldOutPackage], most: int) -> list[HeldOutLoss]:
    """The losses of each package by context. Shorter contexts are cut from the same windows, so that they tell of the same text."""
    # The engine draws one token behind a prompt.
    contexts = [c for c in CONTEXTS if c < llm.info.max_length]
    found = []
    for package in packages:
        longest = windows(documents_stream(llm.get_tokenizer(), package.texts), contexts[-1], most)
        for context in contexts:
            cut = [window[i : i + context] for window in longest for i in range(0, len(window) - 1, context)]
            found.append(HeldOutLoss(package.name, context, measured(llm, cut)))
        _log.info("%s: %.3f nats/token at %d", package.name, found[-1].measured.per_token, contexts[-1])
    return found


def _dialogue_tokenizer(model: str) -> DialogueTokenizer:
    path = resolve_model(model) / "tokenizer.json"
    tokenizer = DialogueTokenizer.from_file(str(path))
    named = tuple(tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS)))
    if named != SPECIAL_TOKENS:
        raise ConfigError(
            f"{path}: its first tokens are not the message tokens of {', '.join(SPECIAL_TOKENS[:3])}, ..."
        )
    return tokenizer

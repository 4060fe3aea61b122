"""The promises that a black-box audit puts to a server, each as a trial that sends requests and compares answers.

A trial is a function of a Talk, which remembers what was sent, so that a difference can be shown and made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from samebit.audit.answers import Answer, Unequal, first_unequal
from samebit.audit.session import Ask, Session
from samebit.workloads import document, question

_NUM_SEEDS = 4
_EVENTS_BEFORE_ABORT = 3


class NotCheckableError(Exception):
    """The server lacks what a trial needs; the message says what."""


class Size(NamedTuple):
    """How large a trial is.

    `round` varies its prompts, `company` is the number of requests sent beside the one, `prompt_chars` the length of the
    long part of a prompt; a shorter one is the beginning of a longer one.
    """

    round: int
    max_tokens: int
    company: int
    prompt_chars: int


class Sent(NamedTuple):
    """Requests that were sent at the same time, and how."""

    how: Literal["plain", "streamed", "broken off"]
    asks: tuple[Ask, ...]


@dataclass(slots=True)
class Talk:
    """What one trial sent and found. Owned by the trial; `unequal` is the first difference, and ends what is kept."""

    session: Session
    size: Size
    sent: list[Sent] = field(default_factory=list)
    comparisons: int = 0
    hits: int = 0
    unequal: Unequal | None = None

    def ask(self, prompt: str | list[int], **fields: Any) -> Ask:  # Any: JSON
        """A request of this trial's length."""
        return self.session.ask(prompt, **{"max_tokens": self.size.max_tokens, **fields})

    def send(self, ask: Ask) -> Answer:
        """One plain answer."""
        return self.send_together([ask])[0]

    def send_together(self, asks: Sequence[Ask]) -> list[Answer]:
        """Plain answers to requests sent at the same time."""
        self._note("plain", *asks)
        answers = self.session.send_together(asks)
        self.hits += sum(bool(answer.cached_tokens) for answer in answers)
        return answers

    def stream(self, ask: Ask, *, most: int | None = None) -> Answer:
        """A streamed answer, broken off after `most` events."""
        self._note("streamed" if most is None else "broken off", ask)
        return self.session.stream(ask, most=most)

    def compare(self, one: Answer, other: Answer) -> None:
        """Hold two answers that must be equal against each other."""
        self.judge(first_unequal(one, other))

    def judge(self, unequal: Unequal | None) -> None:
        """Count a comparison, and keep the first difference."""
        self.comparisons += 1
        if self.unequal is None:
            self.unequal = unequal

    def document(self, label: str, num_chars: int | None = None) -> str:
        """Text that depends on seed, round and label; `num_chars` None: as long as this trial's prompts are."""
        seed = self.session.rng(label, self.size.round).getrandbits(32)
        return document(seed, self.size.prompt_chars if num_chars is None else num_chars)

    def _note(self, how: Literal["plain", "streamed", "broken off"], *asks: Ask) -> None:
        if self.unequal is None:
            self.sent.append(Sent(how, asks))


def repeat(talk: Talk) -> None:
    """The same greedy request, and a seeded one, three times."""
    for fields in _greedy_and_seeded(talk):
        ask = talk.ask(talk.session.nonce() + talk.document("repeat"), **fields)
        first, *others = [talk.send(ask) for _ in range(3)]
        for other in others:
            talk.compare(first, other)


def batch(talk: Talk) -> None:
    """A request alone, then among others of all lengths. It is sent once before, so that only the company changes."""
    for fields in _greedy_and_seeded(talk):
        ask = talk.ask(talk.session.nonce() + talk.document("batch"), **fields)
        talk.send(ask)
        alone = talk.send(ask)
        rng = talk.session.rng("company", talk.size.round)
        others = [
            talk.ask(
                talk.document(f"other {n}", rng.randrange(20, 2 * talk.size.prompt_chars)),
                max_tokens=rng.randrange(4, 40),
            )
            for n in range(talk.size.company)
        ]
        place = rng.randrange(len(others) + 1)
        talk.compare(alone, talk.send_together([*others[:place], ask, *others[place:]])[place])


def warm_prefix(talk: Talk) -> None:
    """A prompt that begins like no other, then the same again."""
    for fields in _greedy_and_seeded(talk):
        ask = talk.ask(talk.session.nonce() + talk.document("warm"), **fields)
        cold = talk.send(ask)
        talk.compare(cold, talk.send(ask))


def growing_conversation(talk: Talk) -> None:
    """The second turn after the first one, once more, and from the start where a salt can be given."""
    rng = talk.session.rng("conversation", talk.size.round)
    opening = talk.session.nonce() + talk.document("conversation") + question(rng.getrandbits(32))
    answer = talk.send(_turns(talk, [opening])).text
    ask = _turns(talk, [opening, answer, question(rng.getrandbits(32))])
    _compare_depths(talk, [ask])


def shared_prefix(talk: Talk) -> None:
    """Prompts that leave a common beginning, one after the other and once more."""
    trunk = talk.session.nonce() + talk.document("trunk")
    _compare_depths(talk, [talk.ask(trunk + talk.document(f"tail {n}", 60 + 7 * n)) for n in range(3)])


def rescore(talk: Talk) -> None:
    """The logprobs of an answer, and those of the same tokens as part of a prompt."""
    can = talk.session.abilities
    if not (can.completions and can.echo and can.logprobs):
        raise NotCheckableError("needs completions with echo and logprobs")
    prompt = talk.session.nonce() + talk.document("rescore")
    answer = talk.send(talk.ask(prompt))
    whole: str | list[int] = prompt + answer.text
    if answer.token_ids and answer.prompt_token_ids:
        whole = [*answer.prompt_token_ids, *answer.token_ids]
    echoed = talk.send(talk.ask(whole, echo=True, max_tokens=1))
    # The last token of the echo was drawn after it.
    again = echoed.tokens[-1 - len(answer.tokens) : -1]
    if [token.text for token in again] != [token.text for token in answer.tokens]:
        raise NotCheckableError("the answer's text is tokenised otherwise than it was generated, and ids are not told")
    drawn, scored = ([token._replace(tops=()) for token in tokens] for tokens in (answer.tokens, again))
    talk.judge(first_unequal(answer._replace(tokens=tuple(drawn)), answer._replace(tokens=tuple(scored))))


def abort(talk: Talk) -> None:
    """A request before and after another with the same beginning was broken off in the middle."""
    if not talk.session.abilities.streaming:
        raise NotCheckableError("needs streaming")
    trunk = talk.session.nonce() + talk.document("abort")
    ask = talk.ask(trunk + talk.document("kept", 40))
    before = talk.send(ask)
    talk.stream(talk.ask(trunk + talk.document("doomed", 90), max_tokens=200), most=_EVENTS_BEFORE_ABORT)
    talk.compare(before, talk.send(ask))
    talk.stream(ask, most=_EVENTS_BEFORE_ABORT)
    talk.compare(before, talk.send(ask))


def streaming(talk: Talk) -> None:
    """An answer at once and in pieces."""
    if not talk.session.abilities.streaming:
        raise NotCheckableError("needs streaming")
    for fields in _greedy_and_seeded(talk):
        ask = talk.ask(talk.session.nonce() + talk.document("streaming"), **fields)
        talk.compare(talk.send(ask), talk.stream(ask))


def seeds(talk: Talk) -> None:
    """Several seeds at temperature 1, each twice: equal for one seed, not all equal for several."""
    if not talk.session.abilities.seed:
        raise NotCheckableError("the server refuses a seed")
    prompt = talk.session.nonce() + talk.document("seeds")
    texts = set()
    for seed in range(_NUM_SEEDS):
        ask = talk.ask(prompt, seed=1000 * talk.size.round + seed, temperature=1.0)
        first = talk.send(ask)
        talk.compare(first, talk.send(ask))
        texts.add(first.text)
    # A few tokens may well be equal by chance.
    if talk.size.max_tokens >= _NUM_SEEDS:
        talk.judge(Unequal(-1, f"{_NUM_SEEDS} seeds gave one text, {texts}") if len(texts) == 1 else None)


class Promise(NamedTuple):
    """A trial with its claim. `needs_hits`: proves nothing where the server says that its cache was not used.

    `company`: requests beside the one, where the trial sends any.
    """

    name: str
    claim: str
    trial: Callable[[Talk], None]
    num_rounds: int = 2
    needs_hits: bool = False
    company: int = 0


PROMISES = (
    Promise("repeat", "The same request gives the same answer.", repeat),
    Promise("batch", "An answer does not depend on the requests beside it.", batch, 4, company=7),
    Promise("warm prefix", "An answer does not depend on a cached prefix.", warm_prefix, 3, needs_hits=True),
    Promise(
        "conversation", "A later turn does not depend on earlier ones being cached.", growing_conversation, 2, True
    ),
    Promise(
        "shared prefix", "Prompts that share a beginning do not change each other's answers.", shared_prefix, 2, True
    ),
    Promise("rescore", "Logprobs of an answer are those of the same tokens in a prompt.", rescore),
    Promise("abort", "A request that is broken off changes no other.", abort),
    Promise("streaming", "Pieces add up to the answer that comes at once.", streaming),
    Promise("seed", "A seed settles the answer, and different seeds differ.", seeds),
)


def _greedy_and_seeded(talk: Talk) -> list[dict[str, Any]]:  # Any: JSON
    return [{}, *([{"temperature": 1.0, "seed": 7 + talk.size.round}] if talk.session.abilities.seed else [])]


def _turns(talk: Talk, texts: list[str]) -> Ask:
    """A conversation whose turns alternate, the user's first."""
    if not talk.session.abilities.completions:
        roles = ("user", "assistant")
        return talk.ask("", messages=[{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)])
    return talk.ask("".join(text if n % 2 else f"\nQuestion: {text}\nAnswer:" for n, text in enumerate(texts)))


def _compare_depths(talk: Talk, asks: list[Ask]) -> None:
    """Each answer after what was sent before, again with all of it cached, and with nothing cached where a salt can be given."""
    first = [talk.send(ask) for ask in asks]
    for ask, answer in zip(asks, first, strict=True):
        talk.compare(answer, talk.send(ask))
        if talk.session.abilities.cache_salt:
            salt = talk.session.nonce().strip("# \n")
            talk.compare(answer, talk.send(Ask(ask.path, ask.body | {"cache_salt": salt})))

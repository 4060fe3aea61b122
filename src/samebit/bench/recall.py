"""The forgetful-agent table: long dialogues answered from the prefix cache, against the same without a cache.

Each problem states facts in its first turns and asks for them in its last. Every turn is a request of its own whose prompt
is all that was said before, so with the cache on each resumes where the one before it ended. A cache that loses a part
of the state makes an agent forget: the answers change. Knows the offline engine only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from samebit.core.request import RequestOutput, SamplingParams
from samebit.dialogues import Spoken, Turn, facts, question, small_talk
from samebit.engine.llm import LLM

PAGE_SIZE = 16
SETTINGS: dict[str, object] = {"page_size": PAGE_SIZE, "checkpoint_interval": PAGE_SIZE, "max_num_seqs": 16}
NUM_TURNS = 40
NUM_FACTS = 6
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Problem:
    """Prompts of all turns, and the value that the answer to each must contain (None: it is not a question)."""

    prompts: list[list[int]]
    values: list[str | None]


@dataclass(frozen=True, slots=True)
class Score:
    """One arm. `transcripts` holds the token ids of every answer of every problem."""

    name: str
    num_questions: int
    num_right: int
    num_solved: int
    num_hits: int
    num_turns: int
    transcripts: list[list[list[int]]]

    @property
    def percent_right(self) -> float:
        """Questions answered with the right value, in percent."""
        return 100 * self.num_right / self.num_questions

    def num_changed(self, other: Score) -> int:
        """Problems whose transcripts differ."""
        return sum(mine != theirs for mine, theirs in zip(self.transcripts, other.transcripts, strict=True))


def make_problems(llm: LLM, count: int) -> list[Problem]:
    """Seeded problems; every second fact is stated so that its value begins right behind a page boundary."""
    return [_problem(Spoken(llm.get_tokenizer(), PAGE_SIZE), random.Random(seed)) for seed in range(count)]


def compare_cache(model: str, num_problems: int, settings: dict[str, object]) -> list[Score]:
    """The arms that must agree: prefix cache on, then off."""
    scores: list[Score] = []
    problems: list[Problem] = []
    for name, caching in (("cache on", True), ("cache off", False)):
        llm = LLM(model, **SETTINGS, **settings, enable_prefix_caching=caching)
        problems = problems or make_problems(llm, num_problems)
        scores.append(run_arm(llm, problems, name))
    return scores


def run_arm(llm: LLM, problems: Sequence[Problem], name: str) -> Score:
    """Ask all turns of all problems, turn by turn, and count exact answers."""
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
    transcripts: list[list[list[int]]] = [[] for _ in problems]
    right: list[list[bool]] = [[] for _ in problems]
    num_hits = 0
    for turn in range(len(problems[0].prompts)):
        outputs = llm.generate([problem.prompts[turn] for problem in problems], params)
        for number, (problem, output) in enumerate(zip(problems, outputs, strict=True)):
            transcripts[number].append(output.outputs[0].token_ids)
            num_hits += output.num_cached_tokens > 0
            value = problem.values[turn]
            if value is not None:
                right[number].append(_is_right(output, value))
    return Score(
        name=name,
        num_questions=sum(map(len, right)),
        num_right=sum(map(sum, right)),
        num_solved=sum(map(all, right)),
        num_hits=num_hits,
        num_turns=len(problems) * len(problems[0].prompts),
        transcripts=transcripts,
    )


def table(scores: Sequence[Score]) -> str:
    """The arms as a Markdown table; transcripts are compared with the first arm's."""
    head = "| arm | answers right | problems solved | transcripts changed | turns from the cache |"
    rows = [
        f"| {s.name} | {s.num_right}/{s.num_questions} ({s.percent_right:.1f} %) | {s.num_solved}/{len(s.transcripts)} "
        f"| {s.num_changed(scores[0])}/{len(s.transcripts)} | {s.num_hits}/{s.num_turns} |"
        for s in scores
    ]
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows])


def _problem(spoken: Spoken, rng: random.Random) -> Problem:
    told = facts(rng, NUM_FACTS)
    prompts: list[list[int]] = []
    values: list[str | None] = []

    def add(turn: Turn) -> None:
        prompts.append(spoken.ask(turn))
        values.append(turn.value)
        spoken.say(turn)

    for number, fact in enumerate(told):
        add(spoken.statement(rng, fact, behind_boundary=number % 2 == 0))
    for _ in range(NUM_TURNS - 2 * NUM_FACTS):
        add(small_talk(rng))
    for fact in rng.sample(told, len(told)):
        add(question(rng, fact))
    return Problem(prompts, values)


def _is_right(output: RequestOutput, value: str) -> bool:
    return output.outputs[0].text.strip().endswith(f" {value}.")

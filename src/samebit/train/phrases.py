"""Sentences about facts that only probes have, the answers, and what else is said in dialogues.

A fact's sentences hold {k} for the key and {v} for the value; corrections may name the value before, {old}. Plain text; knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samebit import dialogues
from samebit.train.forms import Forms
from samebit.train.words import Kind


@dataclass(frozen=True, slots=True)
class Phrases:
    """A probe's sentences about one kind of subject."""

    state: tuple[str, ...]
    correct: tuple[str, ...]
    ask: tuple[str, ...]


PROBE_PHRASES: Mapping[Kind, Phrases] = {
    "thing": Phrases(
        state=(
            "Somebody told me that the {k} is {v}.", "I have learned that the {k} is {v}.", "According to my notes, the {k} is {v}.",
            "We agreed that the {k} is {v}.", "I should mention that the {k} is {v}.", "If anybody asks, the {k} is {v}.",
        ),
        correct=(
            "I was wrong: the {k} is {v}.", "News: they have changed the {k} to {v}.", "Since this morning, the {k} has been {v}.",
            "The {k} used to be {old}; today it is {v}.",
        ),
        ask=(
            "Which was the {k} again?", "Tell me the {k}, please.", "Do you know the {k}?", "I cannot recall the {k}, can you?",
            "Would you remind me of the {k}?",
        ),
    ),
    "mine": Phrases(
        state=(
            "You should know that my {k} is {v}.", "I never told you that my {k} is {v}.", "Did I mention that my {k} is {v}?",
            "One thing about me is that my {k} is {v}.", "In case it matters, my {k} is {v}.", "If anybody asks, my {k} is {v}.",
        ),
        correct=(
            "I was wrong: my {k} is {v}.", "Since last week, my {k} has been {v}.", "My {k} used to be {old}; today it is {v}.",
            "Things have changed, and my {k} is {v} these days.",
        ),
        ask=(
            "Which was my {k} again?", "Tell me my {k}, please.", "Do you know my {k}?", "I cannot recall my {k}, can you?",
            "Would you remind me of my {k}?",
        ),
    ),
    "setting": Phrases(
        state=(
            "Our value of `{k}` is {v}.", "Please use {v} as `{k}`.", "The config file says that `{k}` is {v}.",
            "I would like `{k}` to be {v}.", "On this machine, `{k}` has the value {v}.", "Make sure that `{k}` is {v}.",
        ),
        correct=(
            "I was wrong: `{k}` is {v}.", "Since the last release, `{k}` has been {v}.", "`{k}` used to be {old}; today it is {v}.",
            "We have moved `{k}` to {v}.",
        ),
        ask=(
            "Which value has `{k}`?", "Tell me `{k}`, please.", "Do you know `{k}`?", "I cannot recall `{k}`, can you?",
            "Would you remind me of `{k}`?",
        ),
    ),
}  # fmt: skip
# The one form of an answer, so that an exact reply is well defined.
ANSWERS: Mapping[Kind, str] = {"thing": "The {k} is {v}.", "mine": "Your {k} is {v}.", "setting": "`{k}` is {v}."}
# {x}: the keys that the object shall have.
ASK_JSON = Forms((
    "Answer in JSON with the keys {x}.", "[Give me|I need|Show me|Write|Return] [a JSON object|JSON|an object in JSON] with the keys {x}.",
    "[As|In] JSON, please: {x}.", "JSON with {x}[|, please].", "[Put|Collect|List] {x} in [one|a] JSON object.", "{x} as JSON[|, please].",
    "[Can|Could] you [give|send|show] me {x} [as|in] JSON?", "Fill in a JSON object with [the keys |]{x}.", "What are {x}? Answer in JSON.",
    "The keys are {x}. Answer with a JSON object.", "Tell all about {x} in JSON.", "Make a JSON object of {x} [from what I told you|for me].",
))  # fmt: skip
ACKNOWLEDGED = (
    *dialogues.REPLIES,
    "Got it.",
    "Okay, I will remember that.",
    "Thanks, I made a note.",
)
TALK = (
    *dialogues.TALK,
    "The coffee machine is broken again.",
    "I am on the way to the office.",
    "Lunch was late today.",
    "The build took a long time this morning.",
    "We have a new colleague.",
    "It rains a lot these days.",
)
SHOW_CODE = (
    "Please read this code:",
    "What do you think of this?",
    "Here is a snippet from the project:",
    "Could you review this?",
    "Have a look at this:",
    "I found this in the repository.",
)
SEEN_CODE = (
    "It looks fine to me.",
    "I see nothing wrong with it.",
    "It reads well; I would add a test.",
    "Thanks, I have read it.",
)
COMPLETE_CODE = (
    "Complete this code:", "Please complete the function.", "Finish this function:", "Write the rest of this function.",
    "Continue this code:", "How does this go on?", "Can you complete this?", "I started to write this. Please go on.",
    "Fill in what is missing:", "Here is the beginning of a function. Write the rest.", "Complete the following Python code.",
    "Could you finish this for me?", "What comes next in this code?", "Please continue.",
)  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.",
    "Answer briefly and exactly.",
    "You are a careful programmer who remembers what the user says.",
    "You are a clerk who keeps the records of a small company.",
)
EFFORTS = ("0", "0.1", "0.2", "0.7", "0.9", "0.99")

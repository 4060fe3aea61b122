"""Sentences of training dialogues, each for training or for probes only.

A fact's sentences hold {k} for the key and {v} for the value; those about a thing may name its attribute {a} and the thing {t}
instead of the key, and corrections may name the value before, {old}. Plain text; knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samebit import dialogues
from samebit.train.words import Kind, Split


@dataclass(frozen=True, slots=True)
class Phrases:
    """Sentences about one kind of subject."""

    state: tuple[str, ...]
    correct: tuple[str, ...]
    ask: tuple[str, ...]


_TRAIN: Mapping[Kind, Phrases] = {
    "thing": Phrases(
        state=(
            *(t.replace("{key}", "{k}").replace("{value}", "{v}") for t in dialogues.STATE),
            "By the way, the {k} is {v}.", "Let it be known that {v} is the {k}.", "{v} is the {k}.", "We decided on {v} as the {k}.",
            "Write down {v} for the {k}.", "Use {v} as the {k}.", "The {t} has {v} as its {a}.", "As for the {t}, its {a} is {v}.",
            "Regarding the {t}: the {a} is {v}.", "The {t}'s {a} is {v}.", "The {k}? It is {v}.", "Keep in mind: the {k} = {v}.",
            "About the {k}: {v}.", "I checked the {k} today and it is {v}.", "My colleague says the {k} is {v}.",
            "You will need the {k}, which is {v}.", "It turns out the {k} is {v}.", "I can tell you the {k}: it is {v}.",
            "There is a {t}, and the {k} is {v}.", "I just found out what the {k} is, namely {v}.", "Do not forget the {k}, {v}.",
        ),
        correct=(
            "Update: the {k} is now {v}.", "Correction: the {k} is now {v}.", "The {k} has changed; it is now {v}.",
            "The {k} is {v} from now on.", "The {k} is no longer {old} but {v}.", "Instead of {old}, the {k} is now {v}.",
            "Forget {old}: the {k} is {v}.", "They replaced the {k} with {v}.", "The new {k} is {v}.",
            "The {k} was {old}, but now it is {v}.", "Sorry, I made a mistake. The {k} is {v}.", "Change the {k} to {v}, please.",
            "From today the {t} has {v} as its {a}.", "{v}, not {old}, is the {k} now.", "The {k} became {v}.",
            "As of today the {k} is {v}.", "Actually, the {k} is {v}.", "I have to correct myself, the {k} is {v}.",
            "The {t} got another {a}: {v}.", "What I said about the {k} is out of date; it is {v}.", "The {k} is different now: {v}.",
        ),
        ask=(
            *(t.replace("{key}", "{k}") for t in dialogues.ASK),
            "I forgot the {k}. What is it?", "Please repeat the {k}.", "What was the {k}?", "Which {a} does the {t} have?",
            "Do you remember the {k}?", "The {k}, please?", "What did I say the {k} was?", "I need the {k} now.",
            "Could you look up the {k}?", "What is the current {k}?", "Say the {k} once more.", "What do you have noted for the {k}?",
            "Let me know the {k}.", "What is the {t}'s {a}?", "And the {k}?", "Give me the {k}.", "How about the {k}?",
        ),
    ),
    "mine": Phrases(
        state=(
            "My {k} is {v}.", "Please remember that my {k} is {v}.", "By the way, my {k} is {v}.", "{v} is my {k}.",
            "I have {v} as my {k}.", "For your records: my {k} is {v}.", "Just so you know, my {k} is {v}.", "My {k}? It is {v}.",
            "About me: my {k} is {v}.", "You can note {v} as my {k}.", "I want to tell you that my {k} is {v}.",
            "Since you ask, my {k} is {v}.", "My {k} happens to be {v}.", "As for my {k}, it is {v}.", "Remember my {k}: {v}.",
        ),
        correct=(
            "Update: my {k} is now {v}.", "Correction: my {k} is now {v}.", "My {k} is {v} from now on.",
            "My {k} is no longer {old} but {v}.", "My {k} has changed; it is now {v}.", "My new {k} is {v}.",
            "I have changed my {k} to {v}.", "Sorry, my {k} is {v}, not {old}.", "Actually, my {k} is {v}.",
            "My {k} was {old}, but now it is {v}.", "As of today my {k} is {v}.", "Forget {old}: my {k} is {v}.",
            "{v} is my {k} now.", "What I said about my {k} is out of date; it is {v}.",
        ),
        ask=(
            "What is my {k}?", "Do you remember my {k}?", "Remind me, what is my {k}?", "What was my {k}?", "Can you tell me my {k}?",
            "I forgot my {k}. What is it?", "Please repeat my {k}.", "What did I say my {k} was?", "Say my {k} once more.", "And my {k}?",
            "Could you look up my {k}?", "Give me my {k}.", "What do you have noted for my {k}?", "What is my current {k}?",
        ),
    ),
    "setting": Phrases(
        state=(
            "Set `{k}` to {v}.", "In our config, `{k}` is {v}.", "We use {v} for `{k}`.", "`{k}` = {v}.", "`{k}` is {v}.",
            "`{k}` should be {v}.", "The value of `{k}` is {v}.", "I set `{k}` to {v}.", "Let `{k}` be {v}.",
            "For this project `{k}` equals {v}.", "Take {v} for `{k}`.", "We run with `{k}` = {v}.", "{v} is what we use for `{k}`.",
            "The default for `{k}` is {v}.", "Remember the setting `{k}`: {v}.",
        ),
        correct=(
            "Update: `{k}` is now {v}.", "Correction: `{k}` is now {v}.", "Change `{k}` to {v}.", "`{k}` is no longer {old} but {v}.",
            "We changed `{k}` from {old} to {v}.", "From now on `{k}` is {v}.", "The new value of `{k}` is {v}.",
            "`{k}` was {old}, but now it is {v}.", "Sorry, `{k}` is {v}, not {old}.", "Actually, `{k}` is {v}.",
            "Instead of {old}, use {v} for `{k}`.", "As of today `{k}` is {v}.", "`{k}` has changed; it is now {v}.",
        ),
        ask=(
            "What is the value of `{k}`?", "What did we set `{k}` to?", "What is `{k}`?", "Do you remember `{k}`?", "How large is `{k}`?",
            "I forgot `{k}`. What is it?", "Please repeat `{k}`.", "Give me `{k}`.", "And `{k}`?", "What is the current value of `{k}`?",
            "Remind me, what is `{k}`?", "Could you look up `{k}`?", "What was `{k}`?",
        ),
    ),
}  # fmt: skip
_PROBE: Mapping[Kind, Phrases] = {
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
PHRASES: Mapping[Split, Mapping[Kind, Phrases]] = {"train": _TRAIN, "probe": _PROBE}

# The one form of an answer, so that an exact reply is well defined.
ANSWERS: Mapping[Kind, str] = {"thing": "The {k} is {v}.", "mine": "Your {k} is {v}.", "setting": "`{k}` is {v}."}
# What may stand before a training sentence.
OPENINGS = (
    *(text for text in dialogues.OPENINGS if text),
    "Hello. ", "Hi again. ", "Quick note. ", "Listen. ", "Now something else. ", "Sorry to bother you. ", "That is interesting. ",
)  # fmt: skip
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

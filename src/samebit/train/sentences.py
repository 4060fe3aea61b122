"""Sentences that state, correct and ask for facts: a probe's as they stand, those of training composed from thousands of forms.

A training sentence is a core about the subject, often with a clause before or behind it and remarks around it. Places as in
`samebit.train.phrases`, and {a} and {t} for the attribute and the thing that a key names. Knows no tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from samebit import dialogues
from samebit.train.forms import Forms, capital
from samebit.train.noise import CLOSINGS, LEADS, OPENINGS, QUESTION_LEADS, REASONS, TAILS, around, remarked
from samebit.train.phrases import PROBE_PHRASES
from samebit.train.words import Kind, Split

# Which part of the corrections in training are statements like any other: only their place tells that they are right.
UNMARKED_SHARE = 0.4

_SUBJECTS: Mapping[Kind, Sequence[str]] = {
    "thing": ("the {k}", "the {k}", "the {k}", "the {t}'s {a}", "the {t}'s {a}", "the {a} [for|that belongs to|on record for] the {t}"),
    "mine": ("my {k}", "my {k}", "my {k}", "my {k}", "my own {k}"),
    "setting": ("`{k}`", "`{k}`", "`{k}`", "`{k}`", "[the|our] [setting|constant|option|parameter] `{k}`", "the value of `{k}`"),
}  # fmt: skip
# Clauses that say what a subject is, without capital and full stop.
_CLAUSES = (
    "<s> is {v}", "<s> is {v}", "<s> is {v}", "{v} is <s>", "<s> is [simply|just|exactly|in fact|really|definitely|surely] {v}",
    "<s> [happens|seems|turns out] to be {v}", "<s> [must|should|has to|will|can only] be {v}", "<s> [was|is|has been] set to {v}",
    "[we|they|<who>] [chose|picked|decided on|settled on|agreed on|took|went for] {v} [as|for] <s>", "<s> [was chosen|was meant] to be {v}",
    "{v} [serves|counts|works|stands|goes] as <s>", "{v} [was|is|has been] [picked|chosen|registered|entered] as <s>",
    "[we|I|you] [use|have|take|list|see|keep] {v} [as|for] <s>", "what [we|I|they] have as <s> is {v}", "it is {v} that is <s>",
    "<s>, [it is said|I think|they say|you know], is {v}", "nothing but {v} is <s>", "<s> reads {v}", "{v} is what <s> is",
)  # fmt: skip
_OWN_CLAUSES: Mapping[Kind, Sequence[str]] = {
    "thing": (
        "the {t} has {v} as its {a}", "the {t} has {v} as [its|the] {a}", "the {t} [comes with|carries|got|was given|goes with] {v} as its {a}",
        "[for|of] the {t}, the {a} is {v}", "the {a} which belongs to the {t} is {v}", "there is a {t} [whose|and its|and the] {a} is {v}",
        "the {t} is the one whose {a} is {v}", "{v} is [the {a} that the {t} has|what the {t} has as its {a}]", "the {t} has the {a} {v}",
        "the {a} {v} belongs to the {t}", "{v} is the {a} [of|for] the {t}", "the {t}: its {a} is {v}",
    ),
    "mine": (
        "I [have|use|got|keep|picked|chose] {v} [as|for] my {k}", "I [go|went|live] with {v} as my {k}", "{v} is what I [have|call|use] as my {k}",
        "I would say my {k} is {v}", "I am the one whose {k} is {v}", "{v} has always been my {k}", "the {k} that I have is {v}",
        "I gave {v} as my {k}", "of all there are, {v} is my {k}",
    ),
    "setting": (
        "we [run|work|build|test|deploy] with `{k}` = {v}", "`{k}` [equals|is set to|has been set to|gets|holds|takes] {v}", "`{k}` = {v}",
        "the [default|right value|default value|number] [for|of] `{k}` is {v}", "{v} is [what we use|the value we use|right|good] for `{k}`",
        "we [set|put] `{k}` to {v}", "`{k}` [comes|starts|works|ships] with {v}", "`{k}` is {v} here", "the code has `{k}` = {v}",
    ),
}  # fmt: skip
# Whole sentences that are more than a clause, without capital.
_SENTENCES = (
    "[remember|note|keep|write down|save|store|record|put down|take down|register] {v} [as|for] <s>.", "here is <s>: {v}.", "this is <s>: {v}.",
    "[use|take|assume|read|enter|type|choose] {v} [as|for] <s>.", "<s>: {v}.", "<s> = {v}.", "<s>? [It is|That is|Well,|I say] {v}.",
    "<s>, [which is|namely|that is|in short|of course] {v}.", "{v}: [that is|this is] <s>.", "{v}, [that is|this is|and that is] <s>.",
    "{v}. [That is|This is|So much for] <s>.", "[about|as for|regarding|concerning|on] <s>[:|,] [|it is |that is ]{v}.", "<s> [=|:=|->] {v}",
    "you [will need|asked for|wanted|wait for] <s>, [which|and it|it] is {v}.", "do not [forget|lose|mix up] <s>, [which is |]{v}.",
    "I [looked up|checked|wrote down|found|verified|asked for|have] <s>[| <when>| for you], [and|so] it is {v}.", "let <s> be {v}.",
    "[remember|note|learn|take|save] <s>: {v}.", "I can tell you <s>: [|it is ]{v}.", "set <s> to {v}.", "put {v} in for <s>.",
    "with {v} as <s>, we [are fine|can go on|can start|are done].", "I just found out what <s> is, namely {v}.", "guess what <s> is: {v}!",
    "[what|and what] is <s>? {v}.", "[for|under] <s>, [write|put|enter|note] {v}.", "{v} [goes|belongs] [in the box|in the field] for <s>.",
)  # fmt: skip
# Words that announce a change, before a clause.
_MARKS = (
    "[update|correction|change|a change|a correction]:", "[update|correction|change] from <who>:", "[no|oh|oops|hold on|stop|hm],[| wait:| no:]",
    "actually,", "[small|quick|one more|another|last] [change|correction|update|fix]:", "I have to correct myself:", "sorry, I made a mistake:",
    "sorry, [that was not right|I mixed something up|that is out of date|I misspoke|that was a typo|I was too fast]:", "effective immediately,",
    "[from|as of|starting] [now on|today|now|<day>|tomorrow|this week],", "[that has|this has|it has] changed:", "it is different now:",
    "what I said [before|earlier|about it] [is out of date|no longer holds|is not right|does not count]:", "[new|latest] [state|situation]:",
    "[strike|scratch|ignore|forget] [that|what I said|the last one]:", "<who> [changed it|corrected me|did not agree]:", "instead,",
    "since [the move to <city>|<who> left|<who> came|the meeting|the last update],", "[now|these are the latest facts:|it is official now:]",
)  # fmt: skip
# Sentences that tell a change by themselves, without capital; half of them name the value before.
_CHANGES = (
    "<s> is now {v}.", "<s> is {v} now.", "<s> is {v} from now on.", "now <s> is {v}.", "the new value[| of <s>| for <s>] is {v}: <s>.",
    "<s> [has changed|changed|was changed|was switched|was updated|went over] to {v}.", "<s> has changed; it is [now |]{v}.",
    "<s> [became|will be|turned into] {v}.", "[they|we|I|<who>] [changed|switched|updated|corrected] <s> to {v}.", "change <s> to {v}[|, please].",
    "[they|we|I|<who>] replaced <s> [with|by] {v}.", "<s> is different now: {v}.", "what I said about <s> is out of date; it is {v}.",
    "{v} is <s> [now|from now on|as of today|instead].", "make <s> {v} [instead|from now on|now].", "update <s> to {v}.", "<s>, now {v}.",
    "[in future|from <day> on|until further notice], <s> will be {v}.", "I have a new value for <s>: {v}.", "<s> got a new value, {v}.",
    "<s> is no longer {old} but {v}.", "instead of {old}, <s> is [now |]{v}.", "[forget|drop|never mind|strike] {old}: <s> is {v}.",
    "<s> was {old}, but now it is {v}.", "<s> is {v}, not {old}.", "<s> is [now |]{v} instead of {old}.", "{v}, not {old}, is <s>[| now].",
    "<s> [changed|went|was switched] from {old} to {v}.", "[we|I|they|<who>] changed <s> from {old} to {v}.", "not {old} but {v} is <s>.",
    "[we|I|they|<who>] replaced {old} [with|by] {v} as <s>.", "{v} [replaces|replaced|takes the place of] {old} as <s>.",
    "drop {old} and [use|take] {v} as <s>.", "<s>, [formerly|previously|until now|so far|once] {old}, is [now |]{v}.",
    "{old} is [out of date|history|gone|no longer right]; <s> is {v}.", "<s> was {old} until [<when>|<who> came], and now it is {v}.",
    "it is not {old} any more: <s> is {v}.", "{old} was <s>, {v} is [now|what counts now].", "<s>: {v} (was {old}).", "<s>: {old} -> {v}.",
)  # fmt: skip
_OWN_CHANGES: Mapping[Kind, Sequence[str]] = {
    "thing": (
        "from [today|now on] the {t} has {v} as its {a}.", "the {t} got another {a}: {v}.", "the new {k} is {v}.", "the {t}'s new {a} is {v}.",
        "the {t} now has {v} as its {a}.", "the {t} has a new {a}, {v}.", "the {t} no longer has {old} as its {a} but {v}.",
    ),
    "mine": (
        "my new {k} is {v}.", "I [changed|switched] my {k} to {v}.", "I no longer have {old} as my {k} but {v}.", "I have a new {k}: {v}.",
        "I gave up {old}; my {k} is {v}.", "my latest {k} is {v}.", "I [now |]have {v} as my {k}.",
    ),
    "setting": (
        "the new value of `{k}` is {v}.", "we changed `{k}` from {old} to {v}.", "instead of {old}, use {v} for `{k}`.", "`{k}` was raised to {v}.",
        "`{k}` was too [high|low|slow] at {old}, so it is {v}.", "`{k}` = {v} instead of {old}.", "we had to set `{k}` to {v}.",
    ),
}  # fmt: skip
_QUESTIONS = (
    "what is <s>?", "what is <s>?", "what [is|was] <s>[| again| now| at the moment| by the way| these days], please?", "what was <s>?",
    "what [is|was] <s> [again|now|at the moment|in the end|after all|once more|as of now]?", "what's <s>?", "<s> is what?", "<s> - what is it?",
    "[can|could|will] you [|please ][repeat|give me|look up|check|find|say|show me|name|confirm|state|quote] <s>[| for me| once more| please]?",
    "[please |][repeat|give me|look up|say|state|show me|read out|name|quote|write down|find] <s>[|, please| once more| for me| now].",
    "can you tell me [what <s> is|<s>][|, please]?", "remind me, what [is|was] <s>?", "I [forgot|wonder|ask you|do not know] what <s> [is|was].",
    "I [need|want|have|am trying] to know [what <s> is|<s>].", "let me know [what <s> is|<s>].", "say what <s> is.",
    "what did I [say|tell you|write|state] <s> [was|is]?", "what did I [say|tell you|write|give] [about|as|for] <s>?", "what [about|of] <s>?",
    "what do you have [noted|stored|written down|saved|on file] [as|for] <s>?", "do you [still |][have|remember|recall] <s>?", "and <s>?",
    "do you remember what <s> [is|was]?", "I [forgot|lost|no longer have|did not write down|need|am looking for] <s>. [What|Which] is it?",
    "I [forgot|no longer know|need|am missing] <s>. Can you help?", "<s>, please?", "<s>?", "how about <s>?", "I need <s> [now|again|here].",
    "[about|as for|regarding|on] <s>: what [is|was] it?", "when it comes to <s>, what [is the latest|did I say|holds now|is right]?",
    "what is the [latest|current|present] state of <s>?", "[what|which one] is <s> [currently|presently|right now]?", "<s> is ...",
    "[they|<who>] asked for <s>. What [is it|do I say|should I say]?", "<s>: what was it?", "<s> was what, please?", "is <s> known?",
    "[complete|finish] this: <s> is ...", "which value [is|counts as] <s>?", "what [would|should] I [enter|write|say|put] [as|for] <s>?",
    "[have you got|did you note|did you keep|did you save] <s>?", "what exactly is <s>?", "where did I leave <s>, what is it?",
    "I [cannot|can not|do not|can no longer|did not] [find|see|think of|name|locate|get] <s>[. Do you?|. Can you?|; what is it?|, could you?|, would you?| - you?]",
    "<s> [escapes me|has slipped my mind|is gone from my head|is lost on me|is not at hand][|, can you help|, do you have it|, what is it]?",
    "I am [not sure|unsure|uncertain|in doubt] about <s>[, are you|, could you help|, please say it|. Which is it]?", "nobody [knows|told me] <s>; you?",
    "[anybody|someone|somebody] must know <s>, [you|do you|perhaps you]?", "[hand|pass|read|spell] me <s>[|, would you|, if you can|, will you].",
    "it would help [me|us] to [know|have|see] <s>.", "I [should|ought to|used to] know <s>, but I [do not|forgot][|, sorry][.|. Say it.|. You?]",
)  # fmt: skip
_OWN_QUESTIONS: Mapping[Kind, Sequence[str]] = {
    "thing": (
        "[which|what] {a} does the {t} have[| now| at the moment]?", "[which|what] {a} [belongs to|goes with|is noted for] the {t}?",
        "what [is|was] the {a} [of|for] the {t}?", "the {t}: what is its {a}?", "[for|of] the {t}, what is the {a}?", "the {t} has which {a}?",
        "what does the {t} have as its {a}?", "what is the current {k}?", "I am [looking at|standing by|working on] the {t}. What is its {a}?",
        "about the {t}, what [is|was] the {a}?", "[take|consider] the {t}. What is its {a}?", "the {t}'s {a}, please.", "what {a} has the {t}?",
        "I know the {t}, but what is its {a}?", "the {a}, I mean that of the {t}?",
    ),
    "mine": (
        "[which|what] {k} do I have[| now| at the moment]?", "what do you know as my {k}?", "what is my current {k}?", "which one is my {k}?",
        "what have I [said|told you|given] as my {k}?", "[remember|think of] me? What is my {k}?", "the {k} I told you, what was it?",
        "about me: what is my {k}?", "I mean my {k}. What is it?", "my {k} again, please?", "what was my {k} again?", "name my {k}.",
    ),
    "setting": (
        "what is the [|current ]value of `{k}`?", "what value does `{k}` [have|hold|get|take]?", "how [large|big|high] is `{k}`?",
        "what did we set `{k}` to?", "what is `{k}` set to?", "`{k}` is set to what?", "which value [do we use|did we choose] for `{k}`?",
        "what do we [use|have|take] for `{k}`?", "`{k}` = ?", "what does `{k}` equal?", "in our config, what is `{k}`?", "print(`{k}`)",
    ),
}  # fmt: skip
# What `samebit.dialogues` says, word for word.
_PLAIN = tuple(
    text.replace("The {key}", "<s>").replace("the {key}", "<s>").replace("{value}", "{v}")
    for text in (*dialogues.STATE, *dialogues.ASK)
)
_KINDS: tuple[Kind, ...] = ("thing", "mine", "setting")


def _of_kinds(shared: Sequence[str], own: Mapping[Kind, Sequence[str]]) -> Mapping[Kind, Forms]:
    """The forms of each kind; its own come twice as often as those that all share."""
    return {kind: around((*shared, *own[kind], *own[kind]), {"s": _SUBJECTS[kind]}) for kind in _KINDS}


CLAUSES = _of_kinds(_CLAUSES, _OWN_CLAUSES)
SENTENCES = _of_kinds((*_PLAIN[: len(dialogues.STATE)], *_SENTENCES), dict.fromkeys(_KINDS, ()))
CHANGES = _of_kinds(_CHANGES, _OWN_CHANGES)
QUESTIONS = _of_kinds((*_PLAIN[len(dialogues.STATE) :], *_QUESTIONS), _OWN_QUESTIONS)
MARKS = around(_MARKS)


def statement(rng: random.Random, split: Split, kind: Kind) -> str:
    """A sentence that says what a subject is."""
    if split == "probe":
        return rng.choice(PROBE_PHRASES[kind].state)
    text = SENTENCES[kind].draw(rng) if rng.random() < 0.3 else _clause(rng, kind)
    return _told(rng, text)


def correction(rng: random.Random, split: Split, kind: Kind) -> str:
    """A sentence that says what a subject is from now on; in training often in the words of any other statement."""
    if split == "probe":
        return rng.choice(PROBE_PHRASES[kind].correct)
    draw = rng.random()
    if draw < UNMARKED_SHARE:
        return statement(rng, split, kind)
    marked = draw < UNMARKED_SHARE + 0.2
    return _told(rng, f"{MARKS.draw(rng)} {_clause(rng, kind)}" if marked else CHANGES[kind].draw(rng))


def question(rng: random.Random, split: Split, kind: Kind) -> str:
    """A sentence that asks what a subject is."""
    if split == "probe":
        return rng.choice(PROBE_PHRASES[kind].ask)
    text = QUESTIONS[kind].draw(rng)
    if rng.random() < 0.3:
        text = f"{QUESTION_LEADS.draw(rng)} {text}"
    return opening(rng) + remarked(rng, capital(text), REASONS, 0.12)


def opening(rng: random.Random) -> str:
    """What may stand before a training sentence, nothing in most cases."""
    return rng.choice(OPENINGS) if rng.random() < 0.25 else ""


def _clause(rng: random.Random, kind: Kind) -> str:
    text = CLAUSES[kind].draw(rng)
    if rng.random() < 0.4:
        text = f"{LEADS.draw(rng)} {text}"
    if rng.random() < 0.2:
        text += TAILS.draw(rng)
    return text + rng.choice("....!")


def _told(rng: random.Random, text: str) -> str:
    return opening(rng) + remarked(rng, capital(text), CLOSINGS, 0.12)

"""What may stand around the sentence that matters: openings, clauses that lead to it or follow it, and remarks.

Names, places, times and numbers of remarks are no values of facts, and no word of theirs is an attribute. Plain text with choices.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from samebit import dialogues
from samebit.train.forms import Forms, capital
from samebit.train.words import CITIES, NAMES

WORDS: Mapping[str, Sequence[str]] = {
    "name": NAMES,
    "city": CITIES,
    "number": [str(number) for number in range(2, 1000, 3)],
    "hour": [f"{hour}:{minute:02d}" for hour in range(7, 22) for minute in (0, 10, 15, 30, 45)],
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "noun": "bike box car chair draft email file folder form game key lamp list meeting order page phone plan report roof screen "
    "script shop sign table task test ticket truck visit wall window".split(),
}
_LISTS: Mapping[str, Sequence[str]] = {
    "who": (
        "<name>", "<name>", "<name>", "<name>", "<name> from <city>", "my [colleague|boss|friend|neighbor|cousin]",
        "[our|the] [admin|client|team|supplier|lawyer|architect|secretary|intern|engineer]", "someone from [<city>|the team|support]",
    ),
    "told": ("told me", "said", "says", "wrote", "mentioned", "confirmed", "reports", "claims", "insists", "thinks", "is sure", "announced"),
    "when": (
        "today", "yesterday", "last week", "on <day>", "this afternoon", "a minute ago", "at <hour>", "last month", "earlier", "at lunch",
        "two days ago", "in the evening", "after the meeting", "during the call", "over the weekend",
    ),
    "paper": "report ticket letter document manual screen sign wiki page email form list label sheet plan memo poster notice".split(),
}  # fmt: skip


def around(templates: Sequence[str], lists: Mapping[str, Sequence[str]] | None = None) -> Forms:
    """Forms that may name people, places and times."""
    return Forms(templates, lists={**_LISTS, **(lists or {})}, words=WORDS)


OPENINGS = (
    *(text for text in dialogues.OPENINGS if text),
    "Hello. ", "Hi again. ", "Quick note. ", "Listen. ", "Now something else. ", "Sorry to bother you. ", "That is interesting. ", "Hi. ",
    "Good morning. ", "Hey. ", "Great. ", "Perfect. ", "Right. ", "Fine. ", "Sure. ", "Cool. ", "Let us see. ", "Anyway. ", "Well. ",
    "Moving on. ", "Still there? ", "Back again. ", "Next point. ", "Thank you. ", "I have a moment now. ", "Just a second. ", "Yes. ",
)  # fmt: skip

# Before a clause: "<lead> the key is the value".
LEADS = around((
    "<who> <told> that", "<who> <told> <when> that", "<when> <who> <told> that", "<who> [just|also|already] [wrote|said|confirmed] that",
    "while [I was|we were] in <city>, <who> [told me|said|wrote] that", "when [I|we] met <who> in <city>, [I|we] [heard|read|saw] that",
    "[I|we] [heard|read|noticed|found out|saw|checked] [that|<when> that]", "[I|we] [just|also|only now] [heard|read|found out|saw] that",
    "[please |][remember|note|keep in mind|bear in mind|be aware|do not forget] that", "let it be [known|noted|said] that",
    "[I can|let me|I want to|I wanted to|I have to|I need to] [say|add|report|note|point out|let you know] that",
    "it [turns out|seems|appears|is clear|is a fact|is true|is settled|is certain|is official|looks like it:] that",
    "the <paper> [says|states|shows] that", "the <paper> from <city> [says|states] that", "<when> the <paper> [said|showed] that",
    "[as far as I know|as you may know|as agreed|to be exact|for the record|for later|for your records|in short|all in all],",
    "[just so you know|by the way|before I forget|since you ask|for what it is worth|if you wonder|in case you need it|as promised],",
    "[to start with|first of all|besides|also|incidentally|for your information|next|finally|so|and|well|okay|right|yes],",
    "[the thing|the point|my understanding|the truth|the answer|the good part|what matters|what I know] is that",
    "you [will want|will need|may want|need|might like] to know that", "here is what I know:", "this is [important|useful|new to you]:",
    "[one|another] [detail|fact|point|piece of information]:", "[at|since] <hour>,", "[for|in] the office in <city>,", "<when>,",
    "after [<number>|so many] [minutes|hours|days|emails|calls] [I|we] [learned|understood|could see] that", "<who>: I hear that",
    "[according to|if I understand|as I hear from|like I told] <who>,", "on the way to <city> [I|we] [saw|heard|was told] that",
    "with regard to the <noun> from <who>,", "ticket <number> says that", "page <number> of the <paper> says that", "<who> asked, and",
))  # fmt: skip
# Behind the value of a clause.
TAILS = around((
    ", [at least|or so|that is what|as far as|so] <who> [says|thinks|wrote|knows]", ", I [think|believe|hear|guess|am told]",
    ", as [agreed|planned|promised|expected|you asked|<who> wanted|everybody knows|before lunch]", ", if [I remember well|I am not mistaken]",
    ", [for your records|for what it is worth|just so you know|by the way|in case you need it|for the record|you see|you know]",
    " [at the moment|for the time being|for this project|in our case|in the end|after all|as it stands|here]",
    ", because [<who> asked for it|it was the easiest|we had to choose something|nobody objected|<who> likes it|<city> wanted it]",
    ", [so|and] [please remember it|do not lose it|write it down|keep it safe|that is all|<who> knows it too|nobody else knows]",
    ", [which|and that] [is good to know|surprised <who>|may help you|is fine|took <number> days|is written on the <paper>]",
    " ([as of <hour>|<who> checked|see page <number>|thanks to <who>|really|no joke|so far|ask <who>])", ", says <who>", ", according to <who>",
    ", [I read it|I saw it|it was written|it was announced] [in <city>|on the <paper>|<when>]", ", and <who> [agrees|is happy|confirmed it]",
))  # fmt: skip
# Whole sentences before or behind the one that matters.
REMARKS = around((
    "[I|We] [|just ][came back|returned|moved|flew back] from <city>.", "[I am|We are] [on the way to|off to|back from|still in] <city>.",
    "<who> [called|wrote|came by|sends regards|is late|is on the phone|is waiting|is here][| now| again| too].", "It is <hour> [now|already].",
    "The <noun> [is ready|is broken|was late|has arrived|can wait|looks good|is missing|is in <city>].", "I [have|had] a [long|short|busy] day.",
    "The meeting with <who> [starts at <hour>|is over|went well|took <number> minutes].", "<who> [bought|found|lost|sold] a <noun> in <city>.",
    "[There were|I counted|We had|I have read] <number> [emails|people|pages|calls|questions|tickets] <when>.", "We [sold|bought] <number> of them.",
    "The weather in <city> is [nice|bad|awful|cold|fine].", "My [train|flight|bus] to <city> leaves at <hour>.", "I am [tired|busy|in a hurry].",
    "[Lunch|The call|The visit|The test] is on <day>.", "[I|We] [will see|met|talked to|asked] <who> [on <day>|in <city>|at <hour>].",
    "Seats for <number> people are enough.", "<who> and <who> [are friends|work in <city>|argued|went home].", "Ticket <number> is closed.",
    "The build took <number> [seconds|minutes].", "There is coffee in the kitchen.", "I could not sleep.", "Nothing else is new.",
))  # fmt: skip
# Behind what was told.
CLOSINGS = around((
    "Please [remember|note|keep|save|store|memorize] [it|that|this].", "You [may|might|will] need [it|that] [later|soon|on <day>|again].",
    "I [will|may] ask [again|for it|about it|you for it] [later|soon|on <day>|tomorrow].", "<who> will be [glad|happy|surprised|pleased].",
    "Thanks[| a lot| in advance| for noting it].", "That is all[| for now| for today| from me].", "More about that [later|soon|on <day>].",
    "Is that [clear|okay|fine]?", "[Do not|Never] [forget|lose] it.", "[Okay|Got that|Clear|Right]?", "I hope that helps.", "So much for that.",
    "Let us go on.", "Everybody [knows|agreed|is informed].", "<who> [told me|knows it|wrote it down|can confirm it].", "Make a note[| of it].",
))  # fmt: skip
# Around a question.
REASONS = around((
    "<who> [wants to know|is asking|needs it|asked me|asks for it|has to know|wants it by <hour>].", "I [need|want] it for <who>.",
    "The <paper> asks for it.", "I have to [fill in|complete|check] [a|the] <paper>.", "I am [on the phone with|writing to|with] <who>.",
    "My [memory|note] is [bad|gone|of no help].", "I lost [my|the] <paper>.", "It is for the <paper>.", "I am [a bit lost|not sure any more].",
    "We [talked|spoke] about it [earlier|<when>|before].", "You [have|should have] it somewhere.", "Take the latest one.", "Quickly, please.",
    "It has to be [exact|right|correct].", "I told you [earlier|before|<when>].", "<who> in <city> needs it [now|by <hour>|on <day>].",
))  # fmt: skip
QUESTION_LEADS = around((
    "[quick|one more|another|small|last|next|short|simple|first|final] question:", "[so|and|now|okay|well|right|but|hey|also|again],",
    "[by the way|before I forget|before I go|just to be sure|to be sure|for the <paper>|for <who>|while we are at it|if you remember],",
    "[<who>|the client|somebody] [asks|wants to know|would like to know|is asking|wonders]:", "[help me|remind me|I wonder|I ask myself]:",
    "[back to|a word about] [work|business|the facts]:", "something else:", "[sorry|excuse me],[| but]", "[thanks|fine|good], [and|now]",
))  # fmt: skip


def remarked(rng: random.Random, text: str, behind: Forms, share: float) -> str:
    """The text, in a `share` of the cases each with a remark before it and one from `behind` after it."""
    if rng.random() < share:
        text = f"{capital(REMARKS.draw(rng))} {text}"
    if rng.random() < share:
        text = f"{text} {capital((behind if rng.random() < 0.7 else REMARKS).draw(rng))}"
    return text

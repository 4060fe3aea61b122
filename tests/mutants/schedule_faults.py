"""Faults of planning, committing and preemption, and of the text side of requests."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit

SCHEDULER = "scheduler.scheduler:Scheduler."
PLANNING = "scheduler.planning:"
SEQUENCE = "scheduler.sequence:Sequence."
OUTPUT = "engine.output:OutputProcessor."

SCHEDULE_MUTANTS = [
    Mutant(
        "a last chunk of one token is a decode",
        "What a row is, is told from its length: a prompt token is taken from the device's words.",
        ("vLLM #49918",),
        (edit(PLANNING + "_plan_row", "(sequence.drew_last and", "(row.num_tokens == 1 and"),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a resumed request trusts the device",
        "After preemption the next token is taken from the words of a slot that is not its own any more.",
        ("vllm-metal #488",),
        (
            edit(
                SCHEDULER + "_admitted_row",
                "sequence.drew_last, sequence.drafts, sequence.confidence = False, [], []",
                "pass",
            ),
        ),
        "hits",
        "IndexError",
    ),
    Mutant(
        "a row starts a token early",
        "The first position is counted from the token list instead of the committed length.",
        ("sglang PR #37505",),
        (
            edit(
                SCHEDULER + "_running_row",
                "return planned_row(sequence, state, start, num_tokens,",
                "return planned_row(sequence, state, max(0, start - (num_tokens > 1)), num_tokens,",
            ),
        ),
        "hits",
        "damaged",
    ),
    Mutant(
        "every chunk draws",
        "A chunk that is not the last one draws a token too.",
        ("TensorRT-LLM PR #18295",),
        (
            edit(
                PLANNING + "planned_row",
                "num_tokens > 0 and end - len(drafts) == len(sequence.token_ids) + num_ahead",
                "num_tokens > 0",
            ),
        ),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a preempted request loses its last token",
        "The token that was drawn last and has no state is forgotten.",
        ("sglang PR #35957",),
        (
            edit(
                SCHEDULER + "_preempt",
                "sequence.num_preemptions += 1",
                "sequence.num_preemptions += 1\n    sequence.num_output and sequence.token_ids.pop()",
            ),
        ),
        "hits",
        "token_ids",
    ),
    Mutant(
        "a preempted request repeats its last token",
        "The token that was drawn last is taken in twice.",
        ("sglang PR #35957",),
        (
            edit(
                SCHEDULER + "_preempt",
                "sequence.num_preemptions += 1",
                "sequence.num_preemptions += 1\n    sequence.token_ids.append(sequence.token_ids[-1])",
            ),
        ),
        "hits",
        "token_ids",
    ),
    Mutant(
        "preemption is taken for an end",
        "A preempted request is over once its state is kept.",
        ("sglang PR #40252",),
        (
            edit(
                SCHEDULER + "_preempt",
                "sequence.num_preemptions += 1",
                "sequence.num_preemptions += 1\n    sequence.finish_reason = 'length'",
            ),
        ),
        "hits",
        "never ends",
    ),
    Mutant(
        "prompt logprobs are counted anew",
        "A preempted request reports its prompt's logprobs a second time.",
        (),
        (
            edit(
                SCHEDULER + "_preempt",
                "sequence.num_preemptions += 1",
                "sequence.num_preemptions += 1\n    sequence.num_scored = 0",
            ),
        ),
        "traffic",
        "prompt_logprobs",
    ),
    Mutant(
        "cached tokens are those of the last admission",
        "A preempted request reports its own state as a hit.",
        (),
        (edit(SCHEDULER + "_admitted_row", "if sequence.num_cached < 0:", "if True:"),),
        "hits",
        "later admission",
    ),
    Mutant(
        "a hit swallows prompt logprobs",
        "A prompt that is to be scored resumes beyond tokens that have no score yet.",
        (),
        (edit(PLANNING + "match_limit", "limit = min(limit, next_scored(sequence) - 1)", "pass"),),
        "hits",
        "prompt_logprobs",
    ),
    Mutant(
        "room is asked before a stop",
        "A stop token that is also the last one allowed is reported as the limit.",
        ("sglang #31599",),
        (
            edit(
                "scheduler.sequence:Sequence.stop_after",
                "if token_id in self.stop_ids and self.num_output >= self.request.params.min_tokens:",
                "if len(self.token_ids) < self.max_length and self.num_output >= self.request.params.min_tokens and token_id in self.stop_ids:",
            ),
        ),
        "answers",
        "finish_reason",
    ),
    Mutant(
        "stop tokens are barred for too long",
        "The token after the first `min_tokens` still cannot be a stop.",
        (),
        (
            edit(
                SEQUENCE + "logit_edits",
                "self.num_output + len(guesses) < request.params.min_tokens",
                "self.num_output + len(guesses) <= request.params.min_tokens",
            ),
        ),
        "answers",
        "token_ids",
    ),
    Mutant(
        "the oldest is preempted",
        "For want of pages the oldest request goes first, so that nobody is sure to get on.",
        (),
        (
            edit(
                SCHEDULER + "_preempt_youngest",
                *("victim = self._running[-1]", "victim = self._running[0]"),
                *("if victim is self._running[0]:", "if len(self._running) == 1:"),
            ),
        ),
        "flight",
        "was preempted",
    ),
]

TEXT_MUTANTS = [
    Mutant(
        "requests share a detokeniser",
        "Bytes that one request holds back come out in another.",
        (),
        (
            edit(
                OUTPUT + "open",
                "_OpenRequest(request, detokenizer, parser)",
                "_OpenRequest(request, next(iter(self._open.values())).detokenizer if self._open else detokenizer, parser)",
            ),
        ),
        "text",
        "token_ids",
    ),
    Mutant(
        "requests share stop strings",
        "The stop strings of the first open request end all others.",
        (),
        (
            edit(
                OUTPUT + "open",
                "stops = params.stop_strings",
                "stops = next(iter(self._open.values())).request.params.stop_strings if self._open else params.stop_strings",
            ),
        ),
        "text",
        "token_ids",
    ),
    Mutant(
        "only the last token is searched for a stop",
        "A stop string that begins in one token and ends in another is not seen.",
        ("sglang PR #23802",),
        (
            edit(
                "engine.detokenizer:IncrementalDetokenizer._emit",
                "text, start = self._pending + text, len(self._pending)",
                "text, start, self._state = self._pending + text, len(self._pending), 0",
            ),
        ),
        "text",
        "token_ids",
    ),
    Mutant(
        "text is not held back",
        "The first characters of a stop string are sent before it is complete.",
        ("sglang PR #23802",),
        (
            edit(
                "engine.detokenizer:IncrementalDetokenizer._emit",
                "certain = len(text) - self._stop.held(self._state)",
                "certain = len(text)",
            ),
        ),
        "text",
        "t0: text",
    ),
    Mutant(
        "tokens after a stop are reported",
        "A stop string cuts the text and the request goes on.",
        ("sglang #31599",),
        (
            edit(
                "engine.engine:Engine._deliver",
                "self.scheduler.finish(output.request_id, output.finish_reason)",
                "pass",
            ),
        ),
        "text",
        "KeyError",
    ),
    Mutant(
        "every token is decoded alone",
        "A character of several tokens becomes several replacement characters.",
        (),
        (
            edit(
                "engine.detokenizer:IncrementalDetokenizer.push",
                "self._decoder.decode(self._tokenizer.token_bytes(token_id))",
                "self._tokenizer.token_bytes(token_id).decode('utf-8', 'replace')",
            ),
        ),
        "text",
        "t0: text",
    ),
]

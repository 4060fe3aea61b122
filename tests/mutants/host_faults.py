"""Faults of the host side: ids, the prefix tree, planning and committing, preemption and ends, text."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit, wrap

MANAGER, TREE, POOL = "state.manager:StateManager.", "state.prefix_tree:PrefixTree.", "state.allocator:IdPool."
SCHEDULER, PLANNING = "scheduler.scheduler:Scheduler.", "scheduler.planning:"
OUTPUT = "engine.output:OutputProcessor."


def start_at_the_deepest_node(original, manager, *args):
    state = original(manager, *args)
    if state is not None and state.fork:
        state.length = state.published = state.fork
    return state


def apply_the_last_token_twice(original, manager, *args):
    state = original(manager, *args)
    if state is not None and state.resume is not None:
        state.length -= 1
    return state


def lose_a_delta(original, manager, state):
    deltas = original(manager, state)
    return deltas[:-1] if len(deltas) > 2 else deltas


CACHE_MUTANTS = [
    # Acknowledgement
    Mutant(
        "a checkpoint is published without acknowledgement",
        "What a step was asked to write is published whether or not it was written.",
        ("vLLM PR #37152", "sglang PR #34043"),
        (
            edit(
                SCHEDULER + "_commit_row",
                "if usable and output.pages_intact[index] and output.rows_written[index]:",
                "if usable:",
            ),
        ),
        "losses",
        "published without",
    ),
    Mutant(
        "damage found at a resume is ignored",
        "A resumed row whose history does not carry its tags is used all the same.",
        ("sglang #39830",),
        (edit(SCHEDULER + "_commit_row", "intact = output.rows_intact[number] and", "intact = True or"),),
        "losses",
        "token_ids",
    ),
    Mutant(
        "a damaged checkpoint stays",
        "The request is computed anew, and the next one hits the damage again.",
        ("sglang #39830",),
        (edit(SCHEDULER + "_commit_row", "self._manager.drop_damaged(checkpoint)", "pass"),),
        "losses",
        "stays",
    ),
    Mutant(
        "only the checkpoint of a damaged page is dropped",
        "The page stays on the path, and the next checkpoint is attached to it.",
        ("sglang #39830",),
        (edit(MANAGER + "drop_damaged", "for other in self.tree.checkpoints:", "for other in [checkpoint]:"),),
        "losses",
        "damage",
    ),
    Mutant(
        "damage is met again and again",
        "A request that starts over trusts the cache, and a device that loses everything is asked for ever.",
        ("sglang #39830",),
        (edit(SCHEDULER + "_start_over", "sequence.is_cold = True", "pass"),),
        "losses",
        "no error",
    ),
    Mutant(
        "the stamp of another step",
        "A completed page is noted under the step after the one that wrote it.",
        ("sglang PR #29792",),
        (edit(MANAGER + "advance", "owner_tag(step, state.owner)", "owner_tag(step + 1, state.owner)"),),
        "hits",
        "damaged",
    ),
    # Keys, states and boundaries
    Mutant(
        "a key is longer than its state",
        "An ended answer is published at the page floor of its tokens, the last of which has no state.",
        ("sglang PR #35694", "vLLM PR #34587"),
        (
            edit(
                PLANNING + "_boundaries",
                "floor = publishable_boundary(row.state, page_size)",
                "floor = len(sequence.token_ids) // page_size * page_size or None",
            ),
            edit(PLANNING + "publishable_boundary", "state.length // page_size", "(state.length + 1) // page_size"),
        ),
        "answers",
        "refused",
    ),
    Mutant(
        "a state is longer than its key",
        "A checkpoint is put at the node before its own.",
        ("sglang PR #35694", "vLLM #53505"),
        (
            edit(
                MANAGER + "publish",
                "boundary = pending.entry.boundary",
                "boundary = max(self.geometry.page_size, pending.entry.boundary - self.geometry.page_size)",
            ),
        ),
        "answers",
        "conv stream",
    ),
    Mutant(
        "a hit leaves nothing to compute",
        "A prompt that is cached as a whole is taken as a whole.",
        ("Rapid-MLX PR #1124",),
        (edit(PLANNING + "match_limit", "limit = len(sequence.token_ids) - 1", "limit = len(sequence.token_ids)"),),
        "hits",
        "have not ended",
    ),
    Mutant(
        "the last token before a hit is applied twice",
        "A resumed sequence starts one token before its boundary.",
        ("Rapid-MLX PR #1124",),
        (wrap(MANAGER + "admit", apply_the_last_token_twice),),
        "hits",
        "token_ids",
    ),
    Mutant(
        "a hit is as deep as the tree",
        "A sequence starts at the deepest node of its path, where there are pages and no conv rows.",
        ("vLLM PR #45614", "TensorRT-LLM PR #10875"),
        (wrap(MANAGER + "admit", start_at_the_deepest_node),),
        "hits",
        "refused",
    ),
    Mutant(
        "a snapshot id is a slot id",
        "A row resumes from the snapshot that has the number of its slot.",
        (),
        (edit(PLANNING + "_plan_row", "resume.snapshot, resume.tag", "row.state.slot, resume.tag"),),
        "hits",
        "damaged",
    ),
    Mutant(
        "a row number is a slot id",
        "Rows use the slots that have their numbers in the batch.",
        (),
        (
            edit(
                PLANNING + "_plan_row",
                "row.state.slot, row.state.owner",
                "max(1, row.state.slot // 2), row.state.owner",
            ),
        ),
        "answers",
        "logprobs",
    ),
    Mutant(
        "a chunk's end drops its entry",
        "A boundary where a chunk ends is not kept.",
        ("vLLM PR #34587",),
        (
            edit(
                PLANNING + "_boundaries",
                *("end + 1, interval", "end, interval"),
                *("if start < boundary <= end}", "if start < boundary < end}"),
            ),
        ),
        "hits",
        "from the cache",
    ),
    Mutant(
        "a fork is not kept",
        "Where prompts part there is no checkpoint, so that siblings never hit.",
        ("sglang #22935",),
        (edit(PLANNING + "_boundaries", "row.state.fork: CheckpointKind.FORK", "0: CheckpointKind.FORK"),),
        "hits",
        "from the cache",
    ),
    Mutant(
        "a prompt's end is not kept",
        "Only the grid is kept, so that a repeated prompt is computed from there.",
        ("sglang #22935",),
        (
            edit(
                PLANNING + "_boundaries",
                "sequence.prompt_end: CheckpointKind.PROMPT_END",
                "0: CheckpointKind.PROMPT_END",
            ),
        ),
        "hits",
        "from the cache",
    ),
    Mutant(
        "the last page of a path is never matched",
        "A walk stops a page early, and the cache is useless in silence.",
        ("sglang #22935",),
        (edit(TREE + "walk", "limit - self._page_size + 1", "limit - self._page_size"),),
        "hits",
        "from the cache",
    ),
    # Identity
    Mutant(
        "the salt is ignored",
        "All tenants share one root.",
        ("vLLM #44701", "sglang #24638"),
        (
            edit(TREE + "walk", "self._roots.get(namespace)", "self._roots.get('')"),
            edit(TREE + "extend", "self._roots.setdefault(namespace,", "self._roots.setdefault('',"),
        ),
        "hits",
        "from the cache",
    ),
    Mutant(
        "a page's key is its first tokens",
        "Pages that begin alike are taken for the same.",
        (),
        (
            edit(TREE + "walk", "start + self._page_size])", "start + self._page_size - 1])"),
            edit(TREE + "extend", "(index + 1) * self._page_size])", "(index + 1) * self._page_size - 1])"),
        ),
        "answers",
        "AssertionError",
    ),
    Mutant(
        "a page's key is a hash that collides",
        "Pages with the same sum of tokens are taken for the same.",
        (),
        (
            edit(
                TREE + "walk",
                "tuple(tokens[start : start + self._page_size])",
                "(sum(tokens[start : start + self._page_size]) % 8,)",
            ),
            edit(
                TREE + "extend",
                "tuple(tokens[index * self._page_size : (index + 1) * self._page_size])",
                "(sum(tokens[index * self._page_size : (index + 1) * self._page_size]) % 8,)",
            ),
        ),
        "answers",
        "AssertionError",
    ),
    # Windows
    Mutant(
        "a window page is let go a page early",
        "Trimming forgets that queries look back from the page floor.",
        ("sglang #8649",),
        (edit(MANAGER + "trim", "group.first_position(floor) // size,", "group.first_position(floor) // size + 1,"),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a window is cached without its first page",
        "A checkpoint holds the page of its boundary only.",
        ("sglang PR #31486", "TensorRT-LLM PR #10875"),
        (
            edit(
                MANAGER + "_window_pages",
                "first = min(group.first_position(boundary), boundary - 1) // size",
                "first = (boundary - 1) // size",
            ),
        ),
        "answers",
        "is not covered",
    ),
    Mutant(
        "window pages are never let go",
        "A sequence keeps its pages for as long as it runs.",
        ("mlx-lm #1914",),
        (edit(MANAGER + "trim", "if group.window is None:", "if True:"),),
        "answers",
        "have not ended",
    ),
    Mutant(
        "a cached window page is not owned",
        "A checkpoint takes no reference to its window pages.",
        ("sglang PR #31486", "sglang PR #29352"),
        (edit(MANAGER + "publish", "self.pages[g].share(item.page)", "pass"),),
        "answers",
        "references differ",
    ),
]

ID_MUTANTS = [
    Mutant(
        "quarantine is skipped",
        "A freed id is given out at once.",
        ("sglang PR #18803", "sglang PR #35049"),
        (edit(POOL + "_free_retired", "self._quarantine[0][0] <= self._retired", "True"),),
        "ids",
        "is reused",
    ),
    Mutant(
        "the reserved id is given out",
        "Ids begin with 0, which padding and recording write to.",
        ("sglang PR #17404",),
        (edit(POOL + "__init__", "deque(ids)", "deque(i - 1 for i in ids)"),),
        "ids",
        "reserved id",
    ),
    Mutant(
        "an id is given out twice",
        "Every third time, taking an id leaves it in the free list.",
        ("sglang PR #26941",),
        (
            edit(
                POOL + "take",
                "taken = self._free.popleft()",
                "taken = self._free[0] if len(self._free) % 3 == 1 else self._free.popleft()",
            ),
        ),
        "ids",
        "is reused",
    ),
    Mutant(
        "a reference is dropped twice",
        "A released sequence gives its last page back twice.",
        ("sglang PR #27147",),
        (
            edit(
                MANAGER + "release",
                "for page in held.pages[held.first :]:",
                "for page in held.pages[held.first :] + held.pages[-1:]:",
            ),
        ),
        "ids",
        "KeyError",
    ),
    Mutant(
        "a shared page has one reference",
        "A resumed sequence takes no reference to the pages of its path.",
        ("sglang PR #27147",),
        (edit(MANAGER + "_adopt", "self.pages[g].share(node.page)", "pass"),),
        "hits",
        "references differ",
    ),
    Mutant(
        "a page delta is lost",
        "The device is not told of the last new page when there are several.",
        ("vLLM #42273",),
        (wrap(MANAGER + "take_deltas", lose_a_delta),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "resumed pages have no stamps",
        "Pages of a path are handed on as if they were not complete.",
        ("vLLM #53084",),
        (
            edit(
                MANAGER + "_adopt",
                "self._append(state, g, node.page, node.stamp)",
                "self._append(state, g, node.page, 0)",
            ),
        ),
        "hits",
        "damaged",
    ),
    Mutant(
        "a checkpoint in use is evicted",
        "Eviction does not look at what a planned step reads.",
        ("mini-sglang PR #52", "sglang PR #29352"),
        (edit(TREE + "eviction_order", "if not c.pins", "if True"),),
        "hits",
        "refused",
    ),
    Mutant(
        "a checkpoint stays pinned",
        "The pin of a resume is never taken back, so that it cannot be evicted.",
        ("sglang PR #27038",),
        (edit(MANAGER + "unpin", "checkpoint.pins -= 1", "pass"),),
        "hits",
        "AssertionError: pages",
    ),
    Mutant(
        "a pin is taken back twice",
        "The checkpoint that others still read can be evicted.",
        ("sglang PR #27038", "sglang PR #27147"),
        (edit(MANAGER + "unpin", "checkpoint.pins -= 1", "checkpoint.pins -= 2"),),
        "hits",
        "AssertionError: pages",
    ),
    Mutant(
        "eviction takes the path of others",
        "With a checkpoint goes its whole path, though others lie below it.",
        ("sglang PR #29352",),
        (
            edit(
                TREE + "remove",
                "while node.parent is not None and node.is_bare:",
                "while node.parent is not None and node.checkpoint is None:",
            ),
        ),
        "answers",
        "references differ",
    ),
    Mutant(
        "an evicted checkpoint leaves its pages",
        "Nodes that no checkpoint needs stay, and hold pages that nobody can use.",
        ("sglang PR #40680",),
        (edit(TREE + "remove", "while node.parent is not None and node.is_bare:", "while False:"),),
        "hits",
        "AssertionError: pages",
    ),
    Mutant(
        "a published checkpoint is replaced",
        "Publishing where there is a checkpoint attaches the new one beside it.",
        ("vmlx #198", "sglang PR #29352"),
        (edit(MANAGER + "publish", "self.discard(pending)\n        return", "self.discard(pending)"),),
        "hits",
        "never replaced",
    ),
    Mutant(
        "a snapshot that is not published leaks",
        "Where a checkpoint is already, the snapshot of the second is not given back.",
        ("sglang PR #12693",),
        (edit(MANAGER + "publish", "self.discard(pending)", "pass"),),
        "hits",
        "references differ",
    ),
    Mutant(
        "a refused checkpoint keeps its snapshot",
        "Where the device did not acknowledge a checkpoint, its snapshot is not given back.",
        ("sglang PR #12693",),
        (edit(SCHEDULER + "_commit_row", "self._manager.discard(pending)", "pass"),),
        "losses",
        "references differ",
    ),
    Mutant(
        "eviction frees window pages that others use",
        "With a checkpoint its window pages go as often as there are references.",
        ("sglang PR #25805",),
        (
            edit(
                MANAGER + "drop_checkpoint",
                "for item in held:",
                "for item in [i for i in held for _ in range(self.pages[g].references()[i.page])]:",
            ),
        ),
        "answers",
        "references differ",
    ),
    Mutant(
        "a failed admission keeps its slot",
        "A request that finds no pages goes back to the queue and leaves its slot behind.",
        ("sglang PR #20182",),
        (edit(SCHEDULER + "_admitted_row", "self._manager.release(state)", "pass"),),
        "traffic",
        "references differ",
    ),
    Mutant(
        "an ended request keeps its state",
        "A dropped sequence forgets its state without giving it back.",
        ("sglang PR #26941",),
        (edit(SCHEDULER + "_drop", "self._manager.release(sequence.state)", "pass"),),
        "answers",
        "references differ",
    ),
    Mutant(
        "an aborted request stays in the queue",
        "Aborting one that waits leaves it there.",
        ("sglang PR #20182",),
        (edit(SCHEDULER + "_end", "elif sequence.status is Status.WAITING:", "elif False:"),),
        "traffic",
        "is queued",
    ),
    Mutant(
        "an abort does not wait for its step",
        "State is let go while the step that writes it is in flight.",
        ("sglang PR #29449", "sglang PR #35049"),
        (edit(SCHEDULER + "finish", "if any(row.sequence is sequence for row in self._in_flight):", "if False:"),),
        "flight",
        "IndexError",
    ),
]

SCHEDULE_MUTANTS = [
    Mutant(
        "a last chunk of one token is a decode",
        "What a row is, is told from its length: a prompt token is taken from the device's words.",
        ("vLLM #49918",),
        (edit(PLANNING + "_plan_row", "[] if sequence.drew_last else", "[] if row.num_tokens == 1 else"),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a resumed request trusts the device",
        "After preemption the next token is taken from the words of a slot that is not its own any more.",
        ("vllm-metal #488",),
        (edit(SCHEDULER + "_admitted_row", "sequence.drew_last = False", "pass"),),
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
                "return PlannedRow(sequence, state, state.length, num_tokens)",
                "return PlannedRow(sequence, state, max(0, state.length - (num_tokens > 1)), num_tokens)",
            ),
        ),
        "hits",
        "damaged",
    ),
    Mutant(
        "every chunk draws",
        "A chunk that is not the last one draws a token too.",
        ("TensorRT-LLM PR #18295",),
        (edit(PLANNING + "_plan_samples", "if end == len(sequence.token_ids):", "if end >= row.num_tokens:"),),
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
                "if self.num_output >= params.min_tokens and token_id in self.stop_ids:",
                "if len(self.token_ids) < self.max_length and self.num_output >= params.min_tokens and token_id in self.stop_ids:",
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
                PLANNING + "_plan_samples",
                "if sequence.num_output < params.min_tokens else []",
                "if sequence.num_output <= params.min_tokens else []",
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
                "_OpenRequest(request, detokenizer)",
                "_OpenRequest(request, next(iter(self._open.values())).detokenizer if self._open else detokenizer)",
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

HOST_MUTANTS = [*CACHE_MUTANTS, *ID_MUTANTS, *SCHEDULE_MUTANTS, *TEXT_MUTANTS]

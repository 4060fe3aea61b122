"""Faults of ids: free lists, references, pins, eviction, and what ended requests leave behind."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit, wrap

MANAGER = "state.manager:StateManager."
TREE = "state.prefix_tree:PrefixTree."
POOL = "state.allocator:IdPool."
SCHEDULER = "scheduler.scheduler:Scheduler."


def lose_a_delta(original, manager, state):
    deltas = original(manager, state)
    return deltas[:-1] if len(deltas) > 2 else deltas


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
        (edit("state.eviction:EvictionOrder.first", "elif place.checkpoint.pins:", "elif False:"),),
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
        (edit(SCHEDULER + "_publish", "self._manager.discard(pending)", "pass"),),
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
        (edit(SCHEDULER + "_end", 'elif sequence.status == "waiting":', "elif False:"),),
        "traffic",
        "is queued",
    ),
    Mutant(
        "an abort does not wait for its step",
        "State is let go while the step that writes it is in flight.",
        ("sglang PR #29449", "sglang PR #35049"),
        (
            edit(SCHEDULER + "finish", "if sequence.flight is None:", "if True:"),
            edit(SCHEDULER + "_commit_row", "if sequence.state is not state:", "if False:"),
        ),
        "flight",
        "IndexError",
    ),
]

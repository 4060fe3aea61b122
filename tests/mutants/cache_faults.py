"""Faults of the prefix cache: acknowledgement, keys and boundaries, identity, windows."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit, wrap

MANAGER = "state.manager:StateManager."
TREE = "state.prefix_tree:PrefixTree."
SCHEDULER = "scheduler.scheduler:Scheduler."
PLANNING = "scheduler.planning:"


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


CACHE_MUTANTS = [
    # Acknowledgement
    Mutant(
        "a checkpoint is published without acknowledgement",
        "What a step was asked to write is published whether or not it was written.",
        ("vLLM PR #37152", "sglang PR #34043"),
        (
            edit(
                SCHEDULER + "_publish",
                "if is_usable and not is_past and output.pages_intact[index] and output.rows_written[index]:",
                "if is_usable and not is_past:",
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
                "floor = publishable_boundary(row.state, size)",
                "floor = len(sequence.token_ids) // size * size or None",
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
        (edit(PLANNING + "_plan_row", "resume is None else resume.snapshot", "resume is None else row.state.slot"),),
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
                "row.state.slot",
                "max(1, row.state.slot // 2)",
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
                PLANNING + "_between",
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
        (edit(PLANNING + "_between", "state.fork: CheckpointKind.FORK", "0: CheckpointKind.FORK"),),
        "hits",
        "from the cache",
    ),
    Mutant(
        "a prompt's end is not kept",
        "Only the grid is kept, so that a repeated prompt is computed from there.",
        ("sglang #22935",),
        (
            edit(
                PLANNING + "_between",
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
        (edit(MANAGER + "publish", "self.pages[g].share(item.page, kept=True)", "pass"),),
        "answers",
        "references differ",
    ),
]

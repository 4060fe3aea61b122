"""Faults of a step around its state: samples, recordings, kernels."""

from __future__ import annotations

from tests.mutants.changes import (
    FILL,
    after_index,
    call_c_directly,
    drop_experts_when_crowded,
    fill_other_inputs,
    move_a_table,
    normalise_the_batch,
    sample_the_token_before,
    seeds_of_the_neighbour,
    shift_sample_positions,
)
from tests.mutants.edits import Mutant, edit, wrap

INCIDENT = "sglang PR #34043"

STEP_MUTANTS = [
    # Samples
    Mutant(
        "a sample is one position early",
        "Noise is that of the position before the token to draw.",
        (),
        (after_index(shift_sample_positions),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a sample is drawn from the token before",
        "Logits rows take the hidden state one token early.",
        (),
        (after_index(sample_the_token_before),),
        "answers",
        "prompt_logprobs",
    ),
    Mutant(
        "the seed of a neighbour",
        "Seeds are in the order of another batch.",
        ("vLLM PR #53919",),
        (wrap(FILL, seeds_of_the_neighbour),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "edits of another sample",
        "Logits that are changed for one request are changed for the one after it.",
        (),
        (
            edit(
                "inputs:InputBuffer._fill_edits",
                'host["edit_samples"][part] = number',
                'host["edit_samples"][part] = (number + 1) % (numbered[-1][0] + 1)',
            ),
        ),
        "answers",
        "token_ids",
    ),
    Mutant(
        "logprobs of another row",
        "The likeliest tokens of a step come back in reverse order of rows.",
        (),
        (
            edit(
                "runner.runner:_read_back",
                "columns = [result[name][:samples].tolist() for name in _SAMPLE_COLUMNS]",
                "columns = [result[name][:samples].tolist() for name in _SAMPLE_COLUMNS]; columns[-1].reverse()",
            ),
        ),
        "answers",
        "prompt_logprobs",
    ),
    # Recordings
    Mutant(
        "a buffer moves after capture",
        "A table gets a new place with each step, also after steps have been recorded.",
        ("vLLM PR #55341",),
        (wrap("runner.runner:LocalRunner.launch", move_a_table),),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "replays read the inputs of the capture",
        "Each step fills new inputs, which the recording does not know.",
        ("sglang #37606",),
        (wrap(FILL, fill_other_inputs),),
        "graphs",
        "token_ids",
    ),
    Mutant(
        "a kernel runs outside the dispatcher",
        "A native kernel is called directly, so that a recording holds no trace of it.",
        (INCIDENT,),
        (wrap("models.hash:HashModel.forward", call_c_directly),),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "a value is read by the host",
        "The forward pass asks how many tokens are live.",
        ("vLLM #49918",),
        (
            edit(
                "models.hash:HashModel.forward",
                "return Hidden(x[:, None])",
                "return Hidden(x[:, None] * (1 if index.num_tokens > 0 else 1))",
            ),
        ),
        "graphs",
        "GraphError",
    ),
    # Kernels
    Mutant(
        "experts have a capacity",
        "In a crowded step, an expert is lost to later tokens.",
        (),
        (wrap("kernels.sets:KernelSet.mixture", drop_experts_when_crowded),),
        "weights",
        "bits differ",
    ),
    Mutant(
        "a norm knows its neighbours",
        "A row's normalisation depends, slightly, on the rows beside it.",
        (),
        (wrap("kernels.sets:KernelSet.rms_norm", normalise_the_batch),),
        "weights",
        "bits differ",
    ),
]

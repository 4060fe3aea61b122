"""generate, chat: a model put to use without a server. Each command loads what it needs when it runs."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebit.cli.flags import (
    Device,
    Dtype,
    Kernels,
    MaxModelLen,
    MaxNumSeqs,
    MaxTokens,
    MinP,
    Model,
    NumThreads,
    Seed,
    Temperature,
    TopK,
    TopP,
    engine_config,
    given,
    plain_errors,
)
from samebit.cli.speculation import (
    SpeculativeJson,
    from_json,
)
from samebit.core.errors import SamebitError

if TYPE_CHECKING:
    from samebit.engine.conversation import Conversation


def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given more than once.")] = None,
    source: Annotated[
        Path | None, typer.Option("--input", help='JSON Lines with "prompt" or "messages" and sampling parameters.')
    ] = None,
    target: Annotated[Path | None, typer.Option("--output", help="JSON Lines, one per prompt, in order.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    max_num_seqs: MaxNumSeqs = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Complete prompts in one batch, without a server."""
    if not prompt and source is None:
        raise typer.BadParameter("give --prompt or --input", param_hint="--prompt")
    from samebit.engine.batch_file import (  # noqa: PLC0415 - keeps help quick
        BatchLine,
        check_sampling,
        check_target,
        read_lines,
        run_lines,
        write_outputs,
    )

    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    with plain_errors():
        check_sampling(sampling)
        settings = given(
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            kernels=kernels,
            max_num_seqs=max_num_seqs,
            speculative_config=from_json(speculative_config),
        )
        lines = [BatchLine(prompt=text) for text in prompt or []] + ([] if source is None else read_lines(source))
        if target is not None:
            check_target(target)
        from samebit.engine.llm import LLM  # noqa: PLC0415 - mistakes are told before torch is loaded

        llm = LLM(model, **settings)
        outputs = run_lines(llm, lines, sampling, show_progress=len(lines) > 1 and sys.stderr.isatty())
        if target is not None:
            write_outputs(target, outputs)
            return
    for output in outputs:
        for sample in output.outputs:
            typer.echo(sample.text)


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="A message that stands before the others.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    num_threads: NumThreads = None,
    device: Device = None,
    dtype: Dtype = None,
    kernels: Kernels = None,
    max_model_len: MaxModelLen = None,
    speculative_config: SpeculativeJson = None,
) -> None:
    """Talk to MODEL in the terminal. /reset begins anew, /quit or Ctrl-D ends."""
    import msgspec  # noqa: PLC0415 - keeps help quick

    from samebit.engine.conversation import Conversation  # noqa: PLC0415 - keeps help quick

    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    with plain_errors():
        config = engine_config(
            model=model,
            num_threads=num_threads,
            device=device,
            dtype=dtype,
            kernels=kernels,
            max_model_len=max_model_len,
            speculative_config=from_json(speculative_config),
        )
        conversation = Conversation(config, system=system, seed=seed)
        conversation.set_params(msgspec.structs.replace(conversation.params, **sampling))
    typer.echo(f"{model}: /reset begins anew, /quit ends", err=True)
    while (text := _read_line("> ")) not in (None, "/quit"):
        if text == "/reset":
            conversation.reset()
        elif text:
            _show_answer(conversation, text)


def _show_answer(conversation: "Conversation", text: str) -> None:
    """Print an answer as it comes. Ctrl-C breaks it off; a message that is refused is no reason to leave."""
    try:
        with contextlib.closing(conversation.say(text)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except SamebitError as error:
        typer.echo(f"error: {error}", err=True)
    typer.echo()


def _read_line(prompt: str) -> str | None:
    """A line from the terminal, without blanks around it; None at its end."""
    try:
        return input(prompt if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None

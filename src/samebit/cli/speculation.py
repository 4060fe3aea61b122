"""Flags that say who guesses tokens ahead, in vLLM's spelling (one JSON object) and in sglang's (a flag a field).

Knows names. Which methods there are and what they take is for core/config.py to say.
"""

import json
from typing import Annotated, Any

import typer

from samebit.core.errors import ConfigError

# sglang's names of algorithms, and what they are called here.
_ALGORITHMS = {"NGRAM": "ngram", "NEXTN": "mtp", "EAGLE": "mtp", "DFLASH": "dflash", "DSPARK": "dspark"}

SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='Who guesses tokens ahead, as JSON: {"method": "ngram", "num_speculative_tokens": 5}. Methods: ngram, mtp, '
        "dflash and dspark; the last two take a drafter's folder or hub name as model.",
        metavar="JSON",
    ),
]
Algorithm = Annotated[
    str | None, typer.Option("--speculative-algorithm", help=f"sglang's name of the method: {', '.join(_ALGORITHMS)}.")
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option("--speculative-num-draft-tokens", help="With it: tokens verified a step, guesses plus one."),
]
NumSteps = Annotated[int | None, typer.Option("--speculative-num-steps", help="With it: guesses a step.")]
DraftModel = Annotated[
    str | None, typer.Option("--speculative-draft-model-path", help="With it: the drafter's folder.")
]


def from_json(text: str | None) -> dict[str, Any] | None:  # Any: checked when the engine's settings are
    """The object that `--speculative-config` holds. Raises ConfigError for what is no JSON object."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config={text!r}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f'speculative_config={text!r}: must be an object, as in {{"method": "ngram"}}')
    return found


def from_flags(
    text: str | None, algorithm: str | None, num_draft_tokens: int | None, num_steps: int | None, model: str | None
) -> dict[str, Any] | None:  # Any: as above
    """What both spellings together say; ConfigError where they are mixed, disagree or name no known algorithm."""
    others = {
        "--speculative-num-draft-tokens": num_draft_tokens,
        "--speculative-num-steps": num_steps,
        "--speculative-draft-model-path": model,
    }
    given = {name: value for name, value in others.items() if value is not None}
    if algorithm is None:
        for name, value in given.items():
            raise ConfigError(f"{name}={value!r}: needs --speculative-algorithm")
        return from_json(text)
    if text is not None:
        raise ConfigError(f"--speculative-algorithm={algorithm!r}: give it or --speculative-config, not both")
    if algorithm.upper() not in _ALGORITHMS:
        raise ConfigError(f"--speculative-algorithm={algorithm!r}: must be one of {', '.join(_ALGORITHMS)}")
    # The token before the guesses is verified with them: sglang counts it, vLLM and its steps do not.
    counts = [num_steps, None if num_draft_tokens is None else num_draft_tokens - 1]
    told = {count for count in counts if count is not None}
    if len(told) > 1:
        raise ConfigError(
            f"--speculative-num-steps={num_steps}: --speculative-num-draft-tokens must be one more, "
            f"not {num_draft_tokens}"
        )
    settings = {
        "method": _ALGORITHMS[algorithm.upper()],
        "num_speculative_tokens": next(iter(told), None),
        "model": model,
    }
    return {name: value for name, value in settings.items() if value is not None}

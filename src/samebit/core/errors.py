"""Every error that samebit raises on purpose. Knows nothing of HTTP: the server maps classes to status codes.

SamebitError
├── InvalidRequestError        the caller's request is wrong: names the parameter, the value and the limit
│   └── PromptTooLongError     prompt (plus requested output) exceeds the model's or the pool's limit
├── ConfigError                an engine setting is wrong or does not fit the model or the machine
├── ModelError                 a checkpoint cannot be served
│   ├── ModelNotFoundError     nothing found under that name
│   └── CheckpointError        a tensor or key is missing, unknown, misshapen or unreadable
├── EngineDeadError            the engine process has stopped; no request can be served
├── OverloadedError            the waiting queue is full; try again later
├── GraphError                 a step cannot be recorded, or does other things than its recording
└── StepError                  a step failed; the requests that were in it end with this error
"""

from __future__ import annotations


class SamebitError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequestError(SamebitError):
    """The request is wrong; nothing else is touched. `param` is the name of the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt with the requested output, does not fit."""


class ConfigError(SamebitError):
    """An engine setting is wrong or does not fit the model or the machine."""


class ModelError(SamebitError):
    """A checkpoint cannot be served."""


class ModelNotFoundError(ModelError):
    """Nothing was found under the model name; the message lists what was tried."""


class CheckpointError(ModelError):
    """A tensor or configuration key is missing, unknown, misshapen or unreadable; the message names it."""


class EngineDeadError(SamebitError):
    """The engine process has stopped."""


class OverloadedError(SamebitError):
    """The waiting queue is full."""


class GraphError(SamebitError):
    """A step cannot be recorded, or does other things than its recording; it is not replayed."""


class StepError(SamebitError):
    """A step failed; the requests that were in it end with this error."""

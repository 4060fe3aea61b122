"""What the HTTP process and the engine process say to each other, as bytes.

Knows no sockets. Both processes come from one installation, so there is no version to negotiate.
"""

import msgspec

from samebit.core import errors
from samebit.core.errors import InvalidRequestError, SamebitError
from samebit.core.request import EngineInfo, EngineOutput, Request
from samebit.engine.views import Look, View


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Take on a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End requests without further output; unknown ids are fine, they may just have finished."""

    request_ids: list[str]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache; answered by Done with the same `number`."""

    number: int


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Load other weights beside those that are served; answered by Done with the same `number`."""

    number: int
    model: str


class UseWeights(msgspec.Struct, frozen=True, tag=True):
    """Serve the weights that were loaded last, once no request is open; answered by Done with the same `number`."""

    number: int


class LookAt(msgspec.Struct, frozen=True, tag=True):
    """Show something of the engine; answered by Shown with the same `number`."""

    number: int
    look: Look


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop and exit."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the other process: the name of a class in core.errors and its message."""

    kind: str
    message: str
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests are welcome."""

    info: EngineInfo


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or cannot go on; the process exits."""

    problem: Problem


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything that one step produced."""

    outputs: list[EngineOutput]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A submitted request was not taken on."""

    request_id: str
    problem: Problem


class Done(msgspec.Struct, frozen=True, tag=True):
    """What came of FlushCache, LoadWeights or UseWeights: a problem, or what is served now."""

    number: int
    info: EngineInfo
    problem: Problem | None = None


class Shown(msgspec.Struct, frozen=True, tag=True):
    """What was looked at: an encoded View, or a problem. The engine spent `took_s` on it."""

    number: int
    took_s: float
    view: msgspec.Raw
    problem: Problem | None = None


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The first message: from now on nobody needs the socket's file."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's first step began at `began_s`, by the clock that all processes of a machine share (`time.monotonic`).

    `waited_s`: since the engine took it on.
    """

    request_id: str
    began_s: float
    waited_s: float


class Times(msgspec.Struct, frozen=True, tag=True):
    """Requests that were just admitted, and the seconds that the compilation of grammars and evictions took."""

    admitted: list[Admitted]
    compiled: list[float]
    evicted: list[float]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Gauges and totals of the engine at one moment."""

    values: dict[str, float]


ToEngine = Submit | Abort | FlushCache | LoadWeights | UseWeights | LookAt | Shutdown
FromEngine = Connected | Ready | Fatal | Outputs | Rejected | Done | Shown | Times | Stats

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_view: msgspec.msgpack.Decoder[View | None] = msgspec.msgpack.Decoder(View | None)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message that the engine process received."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """A message that the HTTP process received."""
    return _from_engine.decode(data)


def encode_view(view: View | None) -> msgspec.Raw:
    """A view as part of a message."""
    return msgspec.Raw(_encoder.encode(view))


def decode_view(data: msgspec.Raw) -> View | None:
    """What `encode_view` was given."""
    return _view.decode(data)


def problem_of(error: BaseException) -> Problem:
    """`error` as a value. An error that is not of our own keeps its class name in the message."""
    if isinstance(error, InvalidRequestError):
        return Problem(type(error).__name__, str(error), error.param)
    if isinstance(error, SamebitError):
        return Problem(type(error).__name__, str(error))
    return Problem(SamebitError.__name__, f"{type(error).__name__}: {error}")


def error_of(problem: Problem) -> SamebitError:
    """The error that `problem_of` was given; errors not of our own come back as SamebitError."""
    kind: type[SamebitError] = getattr(errors, problem.kind)
    if issubclass(kind, InvalidRequestError):
        return kind(problem.message, param=problem.param)
    return kind(problem.message)

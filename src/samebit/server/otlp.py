"""Sends spans to a collector (OTLP over HTTP) from a thread of its own; needs the extra `otel`.

Knows OpenTelemetry's SDK, and how many spans wait. Does not know what spans tell, and holds no request up.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from samebit.server.traces import RequestSpan

MAX_WAITING_SPANS = 2048
_FAILING_WAIT_S = 2.0


class OtlpTraces:
    """Owner of the exporter and its thread. Use it in one event loop.

    What the collector does not get is dropped and told to `drop` as a number of spans, from any thread; `say` is told once.
    Sampling, resource, headers, certificates and intervals are those of OpenTelemetry's own environment variables.
    """

    def __init__(
        self,
        endpoint: str,
        version: str,
        *,
        drop: Callable[[int], None],
        say: Callable[[str], None],
        exporter: SpanExporter | None = None,
    ) -> None:
        """`endpoint`: the whole URL, path included. `exporter`: takes the place of one that sends to `endpoint`."""
        # The SDK complains of each batch that fails; here that is counted, and told once.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        self._counted = _Counted(exporter or OTLPSpanExporter(endpoint=endpoint), drop, say)
        about = Resource.create({"service.name": "samebit", "service.version": version})
        # Not at exit: that could wait for a collector, and `close` has been called by then.
        self._provider = TracerProvider(resource=about.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        # One batch may be on its way while as many spans wait as may; so the queue is never full.
        self._provider.add_span_processor(BatchSpanProcessor(self._counted, max_queue_size=MAX_WAITING_SPANS))
        self._tracer = self._provider.get_tracer("samebit", version)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, told: RequestSpan) -> None:
        """Queue a span, as a part of the trace that its request names. Never waits."""
        span = self._tracer.start_span(
            told.name,
            context=self._propagator.extract(told.parent),
            kind=SpanKind.SERVER,
            attributes=told.attributes,
            start_time=told.began_ns,
        )
        if not span.get_span_context().trace_flags.sampled or not self._counted.has_room():
            return
        for name, at_ns in told.events:
            span.add_event(name, timestamp=at_ns)
        if told.is_error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(told.ended_ns)

    async def close(self, timeout_s: float) -> None:
        """Send what waits, for at most so long, and less if the collector did not answer last; the rest is dropped."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send_rest() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # No executor's thread: the program would wait for it at its end.
        threading.Thread(target=send_rest, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(min(timeout_s, _FAILING_WAIT_S) if self._counted.is_failing else timeout_s):
                await done.wait()
        except TimeoutError:
            pass
        finally:
            self._counted.give_up()


class _Counted(SpanExporter):
    """An exporter that knows how many spans are on their way to it, and tells how many got lost."""

    def __init__(self, exporter: SpanExporter, drop: Callable[[int], None], say: Callable[[str], None]) -> None:
        self.is_failing = False
        self._exporter = exporter
        self._drop = drop
        self._say = say
        self._has_said = False
        self._lock = threading.Lock()
        self._num_waiting = 0

    def has_room(self) -> bool:
        """Whether one more span may be queued; if so it counts as waiting, else as dropped."""
        with self._lock:
            has_room = self._num_waiting < MAX_WAITING_SPANS
            self._num_waiting += has_room
        self._lose(int(not has_room))
        return has_room

    def give_up(self) -> None:
        """What still waits is dropped."""
        with self._lock:
            num_lost, self._num_waiting = self._num_waiting, 0
        self._lose(num_lost)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send `spans`; called by the SDK's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - a foreign library begins here, and nothing hangs on it
            result = SpanExportResult.FAILURE
        self.is_failing = result is not SpanExportResult.SUCCESS
        with self._lock:
            # Fewer wait if they have been given up.
            num_sent = min(len(spans), self._num_waiting)
            self._num_waiting -= num_sent
        if self.is_failing:
            self._lose(num_sent)
        return result

    def shutdown(self) -> None:
        """End the exporter."""
        self._exporter.shutdown()

    def _lose(self, count: int) -> None:
        if not count:
            return
        self._drop(count)
        with self._lock:
            has_said, self._has_said = self._has_said, True
        if not has_said:
            self._say(
                "warning: the traces endpoint does not take spans; samebit:dropped_spans_total counts what is lost"
            )

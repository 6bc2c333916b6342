"""Traces of requests, sent by OpenTelemetry to a collector (`otlp_traces_endpoint`).

A request is a span `llm_request`, with the attributes that dashboards of open engines know, and a span below it for
each thing that was done: queue, tokenize, prefill (one a chunk), decode, detokenize, parse, replay. All of them are
made when the request is over, from times that were noted on the way: nothing but notes is done meanwhile. Who sends a
`traceparent` is the parent, and decides whether a request is traced at all; the reply names the span.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from quire.foundation.errors import ConfigError
from quire.server.http.trail import Trail
from quire.types.output import RequestMetrics
from quire.types.view import CHUNK

OPTION = "otlp_traces_endpoint"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS = ("grpc", "http/protobuf")
HEADERS = (b"traceparent", b"tracestate")
PARENT = "traceparent"


def check(endpoint: str | None) -> None:
    """Raises ConfigError for an endpoint (None: there is none) to which no trace could be sent."""
    if endpoint is not None:
        Tracing(endpoint, "").close()


class Tracing:
    """endpoint: of a collector; model: the served name. Raises ConfigError if it cannot be."""

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"{OPTION} needs OpenTelemetry ({error.name} is missing): pip install 'quire[tracing]'",
                OPTION,
                code="missing-package",
            ) from None
        service = os.environ.get("OTEL_SERVICE_NAME", "quire")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service, "quire.model": model}))
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace

    def begin(self, headers: Iterable[tuple[bytes, bytes]], began: float) -> RequestTrace:
        """began: time.time(). headers: of the request."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in HEADERS}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span("llm_request", parent, self._api.SpanKind.SERVER, start_time=_nanoseconds(began))
        return RequestTrace(self, span)

    def context(self, span: Any) -> Any:
        return self._api.set_span_in_context(span)

    def add(self, name: str, context: Any, start: float, end: float, **attributes: Any) -> None:
        """A span that is over."""
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(start))
        span.end(_nanoseconds(max(start, end)))

    def names(self, span: Any) -> dict[str, str]:
        """As headers say who a span is."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.context(span))
        return carrier

    def fail(self, span: Any, message: str | None) -> None:
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, message))

    def close(self) -> None:
        """Send what is left; some seconds at most."""
        self._provider.shutdown()


class RequestTrace:
    """Of one HTTP request."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span
        self.is_recorded: bool = span.is_recording()
        self.names = tracing.names(span)

    def end(self, trail: Trail) -> None:
        """The reply is sent."""
        if not self.is_recorded:
            return
        ended = trail.began + trail.seconds
        context = self._tracing.context(self._span)
        if trail.encoding is not None:
            self._tracing.add(
                "tokenize", context, *trail.encoding, **{"gen_ai.usage.prompt_tokens": trail.prompt_tokens}
            )
        for times in trail.times:
            self._add_request(context, times, ended)
        if trail.parsing.seconds:
            self._add_sum("parse", context, trail.parsing.first, trail.parsing.seconds)
        self._span.set_attributes(_attributes(trail))
        if trail.error is not None or trail.status >= 500:
            self._tracing.fail(self._span, trail.error)
        self._span.end(_nanoseconds(ended))

    def _add_request(self, context: Any, times: RequestMetrics, ended: float) -> None:
        """One of the requests that the engine got."""
        add, done = self._tracing.add, times.finished_time or ended
        first_scheduled, first_token = times.first_scheduled_time, times.first_token_time
        add("queue", context, times.arrival_time, first_scheduled or done)
        chunks = [event for event in times.life if event.what == CHUNK]
        for i, chunk in enumerate(chunks):
            end = chunks[i + 1].at if i + 1 < len(chunks) else max(chunk.at, first_token or done)
            add(
                "prefill", context, chunk.at, end, **{"quire.tokens.first": chunk.first, "quire.tokens.end": chunk.last}
            )
        if first_token is not None:
            add("decode", context, first_token, done, **{"quire.preemptions": times.num_preemptions})
        if times.detokenizing.seconds:
            self._add_sum("detokenize", context, times.detokenizing.first, times.detokenizing.seconds)
        for start, end in times.replays:
            add("replay", context, start, end)

    def _add_sum(self, name: str, context: Any, first: float, seconds: float) -> None:
        """Something done in many small pieces: as long as these together, from the first one on."""
        self._tracing.add(name, context, first, first + seconds, **{"quire.is_sum": True})


def _attributes(trail: Trail) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.request.id": trail.reply_id or trail.id,
        "gen_ai.response.model": trail.model,
        "gen_ai.usage.prompt_tokens": trail.prompt_tokens,
        "gen_ai.usage.completion_tokens": trail.output_tokens,
        "gen_ai.latency.e2e": trail.seconds,
        "http.request.method": trail.method,
        "http.route": trail.route,
        "http.response.status_code": trail.status,
        "quire.cached_tokens": trail.cached_tokens,
    }
    if trail.times:
        found |= _latencies(trail.times[0], trail)
    params = trail.params
    for name in ("temperature", "top_p", "max_tokens", "n"):
        if value := getattr(params, name, None):
            found[f"gen_ai.request.{name}"] = value
    return found


def _latencies(times: RequestMetrics, trail: Trail) -> dict[str, float]:
    """Of the first of its requests, in seconds."""
    scheduled, first, finished = times.first_scheduled_time, times.first_token_time, times.finished_time
    found = {}
    if scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled - times.arrival_time
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - trail.began
    if scheduled is not None and first is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
    if scheduled is not None and finished is not None:
        found["gen_ai.latency.time_in_model_inference"] = finished - scheduled
    if first is not None and finished is not None:
        found["gen_ai.latency.time_in_model_decode"] = finished - first
    return found


def _exporter(endpoint: str) -> Any:
    """By the protocol that the environment names, gRPC if it names none."""
    protocol = os.environ.get(PROTOCOL, os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOLS[0]))
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{PROTOCOL} must be one of {', '.join(PROTOCOLS)}, got {protocol!r}", OPTION)
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
    except ImportError as error:
        raise ConfigError(
            f"{OPTION} by {protocol} needs {error.name}: pip install 'quire[tracing]'", OPTION, code="missing-package"
        ) from None
    return HttpExporter(endpoint=endpoint)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def engine_trace(trail: Trail) -> Mapping[str, str] | None:
    """What an engine request of this HTTP request carries; None: it is not traced."""
    trace = trail.trace
    return trace.names if trace is not None and trace.is_recorded else None

"""Request spans for OpenTelemetry (extra: otel), under vLLM's names.

A request's span is made at its end from times that its outputs have anyway: nothing is done for a token. Spans have
numbers and no texts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError, install_extra
from jaxserve.server.observer import seconds_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import SpanProcessor

    from jaxserve.api.outputs import RequestMetrics
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.server.http import Headers

SPAN_NAME = "llm_request"


class Traces:
    """Exporter of a span for each ended request.

    Args:
        model_name: the model's name.
        processor: span processor, such as one that sends them in batches.
    """

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - needs an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._model_name, self._kind = model_name, SpanKind.SERVER
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve.server")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_endpoint(cls, model_name: str, endpoint: str | None) -> Traces | None:
        """Return an exporter that sends spans to the collector at a URL by OTLP over HTTP; None without a URL."""
        if endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ConfigError(f"otlp_traces_endpoint needs {error.name}; {install_extra('otel')}") from error
        return cls(model_name, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def note(self, headers: Headers, groups: Sequence[RequestGroup]) -> None:
        """Export an ended HTTP request's span.

        Args:
            headers: its headers, in which `traceparent` may name the parent span.
            groups: the engine's requests, one per prompt.
        """
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in (b"traceparent", b"tracestate")
        }
        offset_s = time.time() - time.monotonic()
        first = groups[0].output.metrics
        ends = [each.metrics.finished_s for group in groups for each in group.output.outputs]
        end_s = max(end if end is not None else time.monotonic() for end in ends)
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=_attributes(self._model_name, groups, first, end_s),
            start_time=int((first.arrival_s + offset_s) * 1e9),
        )
        span.end(int((end_s + offset_s) * 1e9))

    def close(self) -> None:
        """Send the spans that are not sent yet."""
        self._provider.shutdown()


def _attributes(model_name: str, groups: Sequence[RequestGroup], first: RequestMetrics, end_s: float) -> dict[str, Any]:
    """Return the attributes of a request's span, without unknown ones.

    Args:
        model_name: the model's name.
        groups: the engine's requests, one per prompt.
        first: times of the first.
        end_s: time when the last ended.
    """
    params = groups[0].params
    outputs = [output for group in groups for output in group.output.outputs]
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": groups[0].request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.prompt_tokens": sum(len(group.output.prompt_token_ids) for group in groups),
        "gen_ai.usage.completion_tokens": sum(output.metrics.num_output_tokens for output in outputs),
        "gen_ai.response.finish_reasons": [output.finish_reason or "abort" for output in outputs],
        "gen_ai.latency.time_in_queue": first.queue_s,
        "gen_ai.latency.time_to_first_token": first.ttft_s,
        "gen_ai.latency.e2e": end_s - first.arrival_s,
        "gen_ai.latency.time_in_model_prefill": first.prefill_s,
        "gen_ai.latency.time_in_model_decode": seconds_between(first.first_token_s, first.last_token_s),
        "gen_ai.latency.time_in_model_inference": seconds_between(first.scheduled_s, end_s),
    }
    return {name: value for name, value in attributes.items() if value is not None}

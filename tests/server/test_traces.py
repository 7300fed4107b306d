"""Spans of requests, as OpenTelemetry's own exporter gets them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.server.traces import Traces
from tests.server.conftest import Running, running
from tests.server.hashed_engine import hashed_engine, write_model


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, exporter: InMemorySpanExporter) -> Iterator[Running]:
    engine = hashed_engine(write_model(tmp_path_factory.mktemp("model")))
    with running(engine, served_model_name=["tiny"]) as server:
        server.app.service.traces = Traces("tiny", SimpleSpanProcessor(exporter))
        yield server


def finished(exporter: InMemorySpanExporter) -> ReadableSpan:
    """Return the only span; it ends after its reply was sent."""
    deadline_s = time.monotonic() + 10
    while not (spans := exporter.get_finished_spans()) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    (span,) = spans
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_numbers(server: Running, exporter: InMemorySpanExporter, stream: bool) -> None:
    exporter.clear()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body: dict[str, Any] = {
        "prompt": [[5, 6, 7], [8, 9]],
        "max_tokens": 6,
        "n": 2,
        "ignore_eos": True,
        "stream": stream,
    }
    body |= {"temperature": 0.5, "top_p": 0.9}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    span = finished(exporter)
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace, parent)
    a = dict(span.attributes or {})
    assert a["gen_ai.usage.prompt_tokens"] == 5
    assert a["gen_ai.usage.completion_tokens"] == 24
    wanted = {"max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "n": 2}
    assert {name: a[f"gen_ai.request.{name}"] for name in wanted} == wanted
    assert a["gen_ai.response.finish_reasons"] == ("length",) * 4
    times = [a[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert 0 <= times[0] <= times[1] <= times[2]
    assert a["gen_ai.latency.time_in_model_prefill"] == pytest.approx(times[1] - times[0])
    assert a["gen_ai.latency.time_in_model_inference"] == pytest.approx(times[2] - times[0])
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(times[2], abs=1e-4)


def test_spans_have_no_texts(server: Running, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    headers = {"traceparent": "canary"}  # not W3C's: the span then has no parent
    body = {"prompt": "canary " * 5, "max_tokens": 3}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    span = finished(exporter)
    assert span.parent is None
    assert "canary" not in span.to_json()


def test_spans_are_sent_to_no_one_by_default(tmp_path: Path) -> None:
    with running(hashed_engine(write_model(tmp_path))) as server:
        assert server.app.service.traces is None

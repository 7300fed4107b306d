"""A server whose engine keeps pages on disk: usage and metrics by tier."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from tests.e2e.sizes import SIZES
from tests.server.conftest import Running, running
from tests.server.test_served_metrics import values
from tests.soon_compiled import as_shipped

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 4


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a server whose pool holds little more than one request."""
    path = str(tmp_path_factory.mktemp("pages"))
    with as_shipped():
        engine = Engine(EngineConfig(str(llama), **SIZES, kv_offloading_path=path))
    engine.wait_until_warm()
    with running(engine, served_model_name=["tiny"]) as server:
        yield server


def flood(server: Running) -> None:
    """Fill the pool with other prompts."""
    schedule = server.engine.schedule
    num_tokens = schedule.max_model_len - 2
    for first in range(2 * schedule.num_pages * schedule.page_size // num_tokens + 1):
        body = {"prompt": [11 + first] * num_tokens, "max_tokens": 1}
        server.client.post("/v1/completions", json=body).raise_for_status()


def usage(server: Running, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
    return server.client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["prompt_tokens_details"]


def test_usage_and_metrics_name_the_tier(server: Running) -> None:
    page_size = server.engine.schedule.page_size
    num_cached = (len(PROMPT) - 1) // page_size * page_size
    assert usage(server) == {"cached_tokens": 0}
    assert usage(server) == {"cached_tokens": num_cached}, "of the device, which needs no word"
    flood(server)
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    before = {tier: values(server, by_source, source=tier) for tier in ("device", "disk")}
    by_tier = {"device": 0, "host": 0, "disk": num_cached}
    assert usage(server) == {"cached_tokens": num_cached, "cached_tokens_by_tier": by_tier}
    assert values(server, by_source, source="disk") == before["disk"] + num_cached
    assert values(server, by_source, source="device") == before["device"]
    assert values(server, "vllm:external_prefix_cache_hits_total") == values(server, by_source, source="disk")
    assert values(server, "vllm:external_prefix_cache_queries_total") >= num_cached
    assert values(server, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= num_cached


def test_other_interfaces_name_the_tier(server: Running) -> None:
    chat = [{"role": "user", "content": "a long question " * 3}]
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": chat},
        "/v1/responses": {"input": chat},
        "/v1/messages": {"messages": chat},
    }
    for path, body in bodies.items():
        fields = body | {"model": "tiny", "max_output_tokens" if "responses" in path else "max_tokens": 1}
        server.client.post(path, json=fields).raise_for_status()
        flood(server)
        counts = server.client.post(path, json=fields).raise_for_status().json()["usage"]
        details = counts.get("prompt_tokens_details") or counts.get("input_tokens_details") or counts
        assert details["cached_tokens_by_tier"]["disk"] > 0, path

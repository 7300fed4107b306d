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

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

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
    by_tier = {"device": 0, "host": 0, "disk": num_cached, "store": 0}
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


def post(server: Running, path: str, status: int = 200, **fields: Any) -> Any:
    reply = server.client.post(path, json=fields)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_sessions_are_saved_and_restored(server: Running) -> None:
    answered = post(
        server, "/v1/completions", prompt=PROMPT[:21], max_tokens=4, session_id="mine", return_token_ids=True
    )
    num_tokens = 21 + len(answered["choices"][0]["token_ids"])
    saved = post(server, "/v1/sessions/mine/save")
    assert (saved["id"], saved["object"], saved["num_tokens"]) == ("mine", "session", num_tokens)
    assert saved["num_stored_tokens"] == (num_tokens - 1) // 4 * 4
    flood(server)
    restored = post(server, "/v1/sessions/mine/restore")
    assert restored["cached_tokens"] == saved["num_stored_tokens"] == sum(restored["cached_tokens_by_tier"].values())
    assert restored["num_computed_tokens"] == num_tokens - restored["cached_tokens"]
    (listed,) = server.client.get("/v1/sessions").json()["data"]
    assert listed == {key: saved[key] for key in ("id", "object", "created", "num_tokens")}
    assert server.client.delete("/v1/sessions/mine").json()["deleted"] is True
    for path in ("/v1/sessions/mine/restore", "/v1/sessions/other/save"):
        assert post(server, path, 404)["error"]["code"] == "session_not_found"
    assert server.client.delete("/v1/sessions/mine").status_code == 404
    assert server.client.get("/v1/sessions/mine").headers["allow"] == "DELETE"
    assert server.client.get("/v1/sessions/mine/save").status_code == 405
    assert post(server, "/v1/sessions/mine/forget", 404)["error"]["code"] == "not_found"


def test_llama_cpps_clients_save_slots(server: Running) -> None:
    post(server, "/v1/completions", prompt=PROMPT[:13], max_tokens=4, ignore_eos=True, id_slot=1)
    saved = post(server, "/slots/1?action=save", filename="chat.bin")
    assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "chat.bin", 17)
    assert saved["n_written"] > 0
    restored = post(server, "/slots/0?action=restore", filename="chat.bin")
    assert (restored["id_slot"], restored["n_restored"]) == (0, 17)
    assert restored["timings"]["restore_ms"] > 0
    assert post(server, "/slots/0?action=erase") == {"id_slot": 0, "n_erased": 17}
    assert post(server, "/slots/0?action=erase") == {"id_slot": 0, "n_erased": 0}
    assert post(server, "/slots/0?action=fork", 400)["error"]["param"] == "action"
    assert post(server, "/slots/0?action=save", 400)["error"]["param"] == "filename"
    assert post(server, "/slots/7?action=restore", 404, filename="none")["error"]["code"] == "session_not_found"


def test_sessions_belong_to_the_keys_owner(server: Running, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:key-a\nb:key-b\n")
    with running(server.engine, served_model_name=["tiny"], api_key_file=keys) as locked:
        owners = [{"authorization": f"Bearer key-{name}"} for name in "ab"]
        body = {"prompt": PROMPT[:9], "max_tokens": 1, "session_id": "mine"}
        locked.client.post("/v1/completions", json=body, headers=owners[0]).raise_for_status()
        assert locked.client.post("/v1/sessions/mine/save", headers=owners[1]).status_code == 404
        assert locked.client.post("/v1/sessions/mine/save").status_code == 401
        locked.client.post("/v1/sessions/mine/save", headers=owners[0]).raise_for_status()
        assert locked.client.post("/v1/sessions/mine/restore", headers=owners[1]).status_code == 404
        assert locked.client.get("/v1/sessions", headers=owners[1]).json()["data"] == []
        reply = locked.client.post("/v1/sessions/mine/restore", headers=owners[0]).raise_for_status().json()
        assert reply["cached_tokens"] == 8


def test_sessions_without_keys_belong_to_the_tenant_in_the_header(server: Running) -> None:
    owners = [{"x-llm-d-inference-fairness-id": name} for name in ("x", "y")]
    body = {"prompt": PROMPT[:9], "max_tokens": 1, "session_id": "by header"}
    server.client.post("/v1/completions", json=body, headers=owners[0]).raise_for_status()
    for headers, status in ((owners[1], 404), ({}, 404), (owners[0], 200)):
        for action in ("save", "restore"):
            assert server.client.post(f"/v1/sessions/by header/{action}", headers=headers).status_code == status


def test_sessions_need_pages_on_disk(engine: Engine) -> None:
    with running(engine) as plain:
        reply = plain.client.post("/v1/sessions/mine/save")
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "sessions_not_supported")

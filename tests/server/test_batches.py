"""OpenAI's client uploads files and runs batches; a restarted server resumes them; tenants do not see each other."""

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxserve.assembly.engine import Engine
from jaxserve.assembly.generation_defaults import OutputLimits
from jaxserve.errors import ConfigError
from jaxserve.offline.llm import LLM
from jaxserve.openai.batch_files import run_batch
from jaxserve.server.batches import api, jobs
from jaxserve.server.batches.store import Store
from jaxserve.server.config import ServerConfig
from tests.server.conftest import Running, running
from tests.waiting import until

ENDED = ("completed", "failed", "expired", "cancelled")


def lines(count: int, max_tokens: int = 4) -> bytes:
    def line(number: int) -> str:
        body = {"prompt": [3 + number % 100, 5], "max_tokens": max_tokens, "temperature": 1, "ignore_eos": True}
        return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})

    return "\n".join(line(number) for number in range(count)).encode()


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 60) -> openai.types.Batch:
    until_s = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < until_s, batch
        time.sleep(0.05)
    return batch


def begin(client: openai.OpenAI, content: bytes, **options: Any) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    options = {"endpoint": "/v1/completions", "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **options)


def bodies(records: str) -> dict[str, Any]:
    read = [json.loads(line) for line in records.splitlines()]
    assert len({record["custom_id"] for record in read}) == len(read)
    return {record["custom_id"]: record["response"]["body"] for record in read}


@pytest.fixture(scope="module")
def server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engine, batch_dir=tmp_path_factory.mktemp("batches"), served_model_name=["tiny"]) as server:
        yield server


def test_a_batch_has_the_records_of_the_batch_runner(server: Running, llm: LLM, tmp_path: Path) -> None:
    client, content = client_of(server), lines(12)
    batch = ended(client, begin(client, content, metadata={"job": "a"}).id)
    assert batch.status == "completed"
    assert batch.metadata == {"job": "a"}
    assert batch.request_counts == openai.types.BatchRequestCounts(total=12, completed=12, failed=0)
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    (tmp_path / "in.jsonl").write_bytes(content)
    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", model_names=["tiny"], use_tqdm=False)
    found, expected = (
        {name: body["choices"] for name, body in bodies(text).items()}
        for text in (client.files.content(batch.output_file_id).text, (tmp_path / "out.jsonl").read_text())
    )
    assert found == expected


def test_failed_lines_are_in_a_file_of_their_own(server: Running) -> None:
    client = client_of(server)
    other = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
    batch = ended(client, begin(client, lines(2) + b"\nnonsense\n" + json.dumps(other).encode()).id)
    assert batch.request_counts == openai.types.BatchRequestCounts(total=4, completed=2, failed=2)
    assert batch.error_file_id is not None
    codes = [json.loads(line)["error"]["code"] for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert sorted(codes) == ["invalid_json_line", "invalid_url"]


def test_a_long_name_does_not_make_a_record_an_error(server: Running) -> None:
    client, line = client_of(server), json.loads(lines(1))
    batch = ended(client, begin(client, json.dumps(line | {"custom_id": "x" * 9000}).encode()).id)
    assert batch.request_counts == openai.types.BatchRequestCounts(total=1, completed=1, failed=0)
    assert batch.error_file_id is None


def test_lines_bring_no_template_that_requests_could_not(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages[0].content }}"}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    client = client_of(server)
    batch = ended(client, begin(client, json.dumps(line).encode(), endpoint="/v1/chat/completions").id)
    assert batch.error_file_id is not None
    assert "--trust-request-chat-template" in client.files.content(batch.error_file_id).text


def test_lines_obey_the_options_of_the_server(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "output_limits", OutputLimits(None, 3))
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    path = "/v1/completions"
    bodies_by_id = {"one": body, "many": body | {"prompt": [[5], [6], [7]]}, "samples": body | {"n": 10**6}}
    content = [{"custom_id": name, "method": "POST", "url": path, "body": each} for name, each in bodies_by_id.items()]
    with running(engine, batch_dir=tmp_path, return_tokens_as_token_ids=True, max_prompts=2) as server:
        client = client_of(server)
        batch = ended(client, begin(client, "\n".join(map(json.dumps, content)).encode()).id)
        found = bodies(client.files.content(batch.output_file_id).text)
        refused = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
        direct = {name: server.client.post(path, json=each).json() for name, each in bodies_by_id.items()}
    assert found["one"]["choices"] == direct["one"]["choices"]
    assert found["one"]["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert found["one"]["usage"]["completion_tokens"] == 3
    messages = {each["custom_id"]: each["error"]["message"] for each in refused}
    assert messages == {name: direct[name]["error"]["message"] for name in ("many", "samples")}


@pytest.mark.long
def test_lines_keep_to_the_rate_of_their_key(engine: Engine, tmp_path: Path) -> None:
    options = {"requests_per_minute_per_key": 120, "tokens_per_minute_per_key": 1000, "api_key": ["one"]}
    with running(engine, batch_dir=tmp_path, **options) as server:
        client, limits = client_of(server, "one"), server.app.service.admission.limits
        tenant = server.app.service.keys.tenant([(b"x-api-key", b"one")])
        for _ in range(120):
            assert limits.take(tenant, 0, time.monotonic()) is None
        long = {"prompt": [5], "max_tokens": 20, "n": 51, "ignore_eos": True}
        line = {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": long}
        began_s = time.monotonic()
        batch = ended(client, begin(client, lines(4) + b"\n" + json.dumps(line).encode()).id)
        assert time.monotonic() - began_s > 1.4, "two requests a second"
        assert batch.request_counts == openai.types.BatchRequestCounts(total=5, completed=4, failed=1)
        assert "at most 1000 tokens per minute" in client.files.content(batch.error_file_id).text
        left = dict(limits.headers(tenant, time.monotonic()))
        assert int(left[b"x-ratelimit-remaining-requests"]) <= 1
        used = 4 * (2 + 4)
        assert 1000 - used <= int(left[b"x-ratelimit-remaining-tokens"]) <= 1000


def test_a_failure_that_cannot_be_noted_ends_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owned, failures = server.app._batches._jobs, [OSError("full"), OSError("full")]
    serve, fail = owned._serve, owned._fail

    def failing(action: Any, *args: Any) -> None:
        if failures:
            raise failures.pop()
        action(*args)

    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    monkeypatch.setattr(owned, "_serve", lambda *args: failing(serve, *args))
    monkeypatch.setattr(owned, "_fail", lambda *args: failing(fail, *args))
    client = client_of(server)
    assert ended(client, begin(client, lines(1)).id).status == "completed"
    assert "cannot be noted" in caplog.text


def test_an_empty_file_fails_the_batch(server: Running) -> None:
    client = client_of(server)
    batch = ended(client, begin(client, b"\n").id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == ["empty_file"]


def test_a_cancelled_batch_keeps_what_is_done(server: Running) -> None:
    client = client_of(server)
    batch = begin(client, lines(300, max_tokens=40))
    until(lambda: (counts := client.batches.retrieve(batch.id).request_counts) and counts.completed)
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.output_file_id is not None
    kept = bodies(client.files.content(batch.output_file_id).text)
    assert 0 < len(kept) < 300
    assert batch.request_counts.completed == len(kept)
    with pytest.raises(openai.ConflictError, match="must be unfinished to be cancelled"):
        client.batches.cancel(batch.id)


def test_a_restarted_server_resumes(engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server.batches")
    with running(engine, batch_dir=tmp_path) as server:
        client = client_of(server)
        batch = begin(client, lines(40, max_tokens=20))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        server.app._batches.stop()  # as the end of the server does, which here waits for the engine first
    (records,) = tmp_path.glob("*.records")
    num_before = records.read_bytes().count(b"\n")
    assert 0 < num_before < 40
    with running(engine, batch_dir=tmp_path) as server:
        client = client_of(server)
        batch = ended(client, batch.id)
        assert batch.request_counts.completed == 40
        assert len(bodies(client.files.content(batch.output_file_id).text)) == 40
    assert not list(tmp_path.glob("*.records"))
    said = [record.getMessage() for record in caplog.records if batch.id in record.getMessage()]
    wanted = [
        "starts: 40 lines",
        "resumes: .* lines done, 0 failed",
        "completed after .*: 40 of 40 lines done",
    ]
    assert len(said) == 3
    assert all(re.search(pattern, line) for pattern, line in zip(wanted, said, strict=True)), said


def test_lists_have_pages(server: Running) -> None:
    client = client_of(server)
    files = [client.files.create(file=(f"{i}.jsonl", lines(1)), purpose="batch") for i in range(3)]
    listed = [file.id for file in client.files.list(limit=2, purpose="batch")]  # the client asks for further pages
    assert {file.id for file in files} <= set(listed)
    assert len(listed) == len(set(listed))
    begin(client, lines(1))
    assert all(batch.object == "batch" for batch in client.batches.list(limit=1))
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-000000000000000000000000"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
    ],
)
def test_what_a_batch_cannot_be_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    file = client_of(server).files.create(file=("a.jsonl", lines(1)), purpose="batch")
    whole = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | body
    reply = server.client.post("/v1/batches", json=whole)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_uploads_are_forms_within_limits(engine: Engine, tmp_path: Path) -> None:
    with running(engine, batch_dir=tmp_path, max_batch_file_bytes=1000, max_batch_storage_bytes=1500) as server:
        client = client_of(server)
        with pytest.raises(openai.BadRequestError, match="purpose must be"):
            client.files.create(file=("a", b"{}"), purpose="assistants")
        with pytest.raises(openai.APIStatusError, match="at most 1000 bytes"):
            client.files.create(file=("a", bytes(5000)), purpose="batch")
        client.files.create(file=("a", bytes(800)), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="1500 bytes in all"):
            client.files.create(file=("a", bytes(800)), purpose="batch")
        reply = server.client.post("/v1/files", content=b"{}", headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert "multipart/form-data" in reply.json()["error"]["message"]
    assert not list(tmp_path.glob("*.upload"))


def test_uploads_at_the_same_time_share_the_quota(engine: Engine, tmp_path: Path) -> None:
    """The second one is refused before it is read: its room is held by the first."""
    content = b"x" * 200_000
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: '
    form += b'form-data; name="file"; filename="a"\r\n\r\n' + content + b"\r\n--b--\r\n"
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(form)
    with running(engine, batch_dir=tmp_path, max_batch_storage_bytes=250_000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        one, two = (socket.create_connection((host, int(port)), timeout=20) for _ in range(2))
        with one, two:
            one.sendall(head + form[:100_000])
            until(lambda: server.app._batches._quota._uploads)
            two.sendall(head)
            assert two.recv(65536).startswith(b"HTTP/1.1 413")
            one.sendall(form[100_000:])
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        with pytest.raises(openai.APIStatusError, match="250000 bytes in all, got 250001 with this one; delete"):
            client_of(server).files.create(file=("a", bytes(50_001)), purpose="batch")
        client_of(server).files.create(file=("a", bytes(50_000)), purpose="batch")


def test_what_has_been_kept_for_its_time_is_deleted(engine: Engine, tmp_path: Path) -> None:
    with running(engine, batch_dir=tmp_path, batch_retention_days=2.0) as server:
        client, store = client_of(server), server.app._batches._store
        batch = ended(client, begin(client, lines(1)).id)
        file = client.files.retrieve(batch.output_file_id)
        assert file.expires_at == file.created_at + 2 * 24 * 3600
        waits = client.files.create(file=("a.jsonl", lines(1)), purpose="batch")
        store.add_batch({"input_file_id": waits.id, "status": "finalizing"}, store.owner(waits.id))  # nobody is woken
        assert store.delete_expired(file.expires_at - 10) == 0
        assert store.delete_expired(file.expires_at + 10) == 3
        assert [each.id for each in client.files.list()] == [waits.id]
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(batch.id)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("deletes", ["expired", "wanted"])
def test_a_batch_keeps_its_input_or_is_not_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: str) -> None:
    store, batches = Store(tmp_path, 10), []
    (path := store.new_upload()).write_bytes(lines(1))
    file = store.add_file(path, "a", "batch", "one")
    fields = {"input_file_id": file["id"], "status": "validating"}
    other = threading.Thread(target=lambda: batches.append(store.add_batch(fields, "one")))
    objects = store.objects

    def objects_before_the_batch(kind: str, owner: str | None = None) -> Iterator[dict[str, Any]]:
        found = list(objects(kind, owner))
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits for the store
        return iter(found)

    monkeypatch.setattr(store, "objects", objects_before_the_batch)
    if deletes == "expired":
        assert store.delete_expired(file["expires_at"]) == 1
    else:
        assert store.delete_file(file["id"]) is None
    other.join(20)
    assert batches == [None]
    assert store.get(file["id"]) is None


@pytest.mark.parametrize("days", [float("inf"), float("nan"), 1e308, 0.0])
def test_files_are_kept_for_a_time_that_has_an_end(days: float) -> None:
    with pytest.raises(ConfigError, match=rf"batch_retention_days must be .*, got {re.escape(str(days))}"):
        ServerConfig(batch_retention_days=days)


def test_tenants_do_not_see_each_other(engine: Engine, tmp_path: Path) -> None:
    with running(engine, batch_dir=tmp_path, api_key=["one", "two"]) as server:
        one, two = client_of(server, "one"), client_of(server, "two")
        batch = ended(one, begin(one, lines(1)).id)
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(batch.output_file_id)
        assert not list(two.files.list())
        assert not list(two.batches.list())
        with pytest.raises(openai.BadRequestError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")


def test_tenants_share_no_cached_prompts(engine: Engine, tmp_path: Path) -> None:
    body = {"prompt": [3 + index for index in range(40)], "max_tokens": 1}
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    cached = []
    with running(engine, batch_dir=tmp_path, api_key=["red", "blue"]) as server:
        for key in ("red", "red", "blue"):
            client = client_of(server, key)
            batch = ended(client, begin(client, line).id)
            assert batch.output_file_id is not None
            usage = bodies(client.files.content(batch.output_file_id).text)["x"]["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0 < cached[1]


def test_a_tenant_has_few_unfinished_batches(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_MAX_UNFINISHED", 0)
    client = client_of(server)
    file = client.files.create(file=("a.jsonl", lines(1)), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="fewer than 0 unfinished batches"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", lines(1)), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )


def test_without_a_directory_there_are_none(engine: Engine) -> None:
    with running(engine) as server:
        reply = server.client.get("/v1/files")
        assert (reply.status_code, "need --batch-dir" in reply.text) == (404, True)
        assert isinstance(reply, httpx.Response)

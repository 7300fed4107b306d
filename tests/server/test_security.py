"""One test per class of vulnerability that servers of language models have had, and the limits of requests."""

import ast
import contextlib
import itertools
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import jaxserve
from jaxserve import pallas_kernels, weights
from jaxserve.assembly.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.server import connection, json_body
from jaxserve.server.app import _OPEN_PATHS
from jaxserve.text import chat_template
from tests.server.conftest import Running, running
from tests.server.hashed_engine import hashed_engine, round_tokens, write_model

CANARY = "canary-7f3a91"
KEY = {"authorization": "Bearer alpha"}


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return hashed_engine(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(hashed: Engine) -> Iterator[Running]:
    with running(hashed, served_model_name=["tiny"]) as server:
        yield server


@pytest.fixture
def guarded(hashed: Engine, tmp_path: Path) -> Iterator[Running]:
    file = tmp_path / "keys"
    file.write_text("acme:alpha\nother:beta\n")
    with running(hashed, api_key_file=file) as server:
        yield server


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes, and return what comes until the server closes or has replied."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(data)
        return sock.recv(65536)


class Healthy:
    """A stream whose tokens are checked at its end."""

    def __init__(self, server: Running, count: int = 150, headers: Any = None) -> None:
        self.prompt, self.count = [5, 6, 7, 8, 9], count
        body = {"prompt": self.prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        self.body, self.url = body | {"return_token_ids": True}, f"{server.url}/v1/completions"
        self.headers, self.tokens = headers, []
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, headers=self.headers, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []

    def __enter__(self) -> "Healthy":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(60)
        assert self.tokens == round_tokens(self.prompt, self.count)


# Deserialisation


@pytest.mark.long
def test_the_package_runs_no_code_from_data() -> None:
    own_data = {
        Path("execution/program_store.py"),  # compiled programs in the cache of the user
        Path("core/process_messages.py"),  # an anonymous pipe between an engine and the process that it has started
    }
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    packages = [Path(package.__file__).parent for package in (jaxserve, pallas_kernels, weights)]
    suspicious = re.compile("|".join([*forbidden_modules, "eval", "exec", "__import__", "trust_remote_code"]))
    for root, path in ((folder, path) for folder in packages for path in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if suspicious.search(text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if path.relative_to(root) not in own_data:
                assert not forbidden_modules & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), f"{path}:{node.lineno}"
                assert node.value.value is False, f"{path}:{node.lineno}"


def test_one_socket_listens(hashed: Engine) -> None:
    def listening() -> set[int]:
        return {c.laddr.port for c in psutil.Process().net_connections("all") if c.status == psutil.CONN_LISTEN}

    before = listening()
    with running(hashed) as server:
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert listening() - before == {int(server.url.rsplit(":", 1)[1])}


# Code in the files of a model


def test_a_hostile_model_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = tmp_path / "touched"
    model = write_model(
        tmp_path / "model",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
        chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}",
    )
    (model / "evil.py").write_text(f"open({str(touched)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (model / "config.json").write_text(json.dumps(config))
    with running(hashed_engine(model)) as server:
        reply = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert reply.status_code == 400
        assert "unsafe" in reply.json()["error"]["message"]
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert not touched.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_has_a_deadline(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_S", 0.1)
    template = chat_template.ChatTemplate(source)
    with pytest.raises(RequestError, match="must render within"):
        template.render({"s": "a" * 1000})


def test_requests_bring_no_template(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for extra in (
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": {"messages": []}},
    ):
        assert server.client.post("/v1/chat/completions", json=chat | extra).status_code == 400


# Ways around the key


def test_no_way_around_the_key(guarded: Running) -> None:
    routes = {path for _, path in guarded.app._handlers} | {"/v1/models/tiny", "/nowhere", "/docs", "/openapi.json"}
    assert len(routes) > 10
    closed = sorted(routes - _OPEN_PATHS)
    hosts = ("x", "127.0.0.1", "x/health", "health?", "x#/health", "/health")
    for path, host in itertools.product(closed, hosts):
        verbs = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH") if host == "x" else ("GET",)
        spellings = [
            path,
            "/" + path,
            path.replace("/", "%2f"),
            path + "/",
            f"http://x/health/..{path}",
            f"/health/..{path}",
        ]
        spellings += [path + "?x=/health", path + ";/health", path + "%00", path.upper(), f"/.{path}"]
        requests = [f"{verb} {path}" for verb in verbs]
        requests += [f"GET {spelling}" for spelling in spellings] if host == "x" else []
        for request in requests:
            head = f"{request} HTTP/1.1\r\nHost: {host}\r\nX-Original-URL: /health\r\nX-Forwarded-Prefix: /health\r\n"
            line = exchange(guarded.url, f"{head}Connection: close\r\n\r\n".encode()).split(b"\r\n")[0]
            assert line.split()[1] in (b"401", b"400"), (request, host, line)  # 400: it is no HTTP


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer alpha beta", "Basic alpha", "bearer\talpha", "Bearer ALPHA"])
def test_only_the_key_is_the_key(guarded: Running, value: str) -> None:
    assert guarded.client.get("/v1/models", headers={"authorization": value}).status_code == 401


# Requests that the server makes


def test_the_server_calls_nobody(server: Running) -> None:
    calls: list[str] = []
    main = threading.get_ident()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        is_call = event in (
            "socket.connect",
            "socket.getaddrinfo",
            "socket.sendto",
            "urllib.Request",
            "subprocess.Popen",
        )
        if event == "subprocess.Popen" and str(args[1]).endswith("structured_output/child.py']"):
            return  # the process that compiles grammars
        if is_call and threading.get_ident() != main:
            calls.append(f"{event} {args}")

    sys.addaudithook(audit)
    urls = ["http://10.0.0.1/x", "https://example.org\\@10.0.0.1/x", "file:///etc/passwd", "data:image/png;base64,AAAA"]
    for url in urls:
        part = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": f"![x]({url})"}, part]
        reply = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert reply.status_code == 400, reply.text
        text = [{"role": "user", "content": f"![x]({url})"}]
        assert server.client.post("/v1/chat/completions", json={"messages": text, "max_tokens": 1}).status_code == 200
        schema = {"$ref": url}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = server.client.post("/v1/chat/completions", json={"messages": text, "response_format": form})
        assert reply.status_code == 400, reply.text
    assert calls == []


# Parameters that cost more than they say

COSTLY: list[dict[str, Any]] = [
    {"n": 10**9},
    {"n": 2**70},
    {"best_of": 10**9},
    {"max_tokens": 10**12},
    {"logprobs": 10**9},
    {"prompt_logprobs": 10**9},
    {"temperature": 1e308},
    {"temperature": -1},
    {"top_k": 2**40},
    {"seed": 2**80},
    {"stop": ["a" * 100_000]},
    {"stop": ["x"] * 10_000},
    {"bad_words": ["a" * 50] * 5000},
    {"logit_bias": {str(i): 1 for i in range(50_000)}},
    {"logit_bias": {"-1": 100}},
    {"logit_bias": {"99999999999999999999": 1}},
    {"allowed_token_ids": list(range(100_000))},
    {"stop_token_ids": [-1]},
    {"prompt": [2**31 - 1]},
    {"prompt": [-1]},
    {"prompt": ["a"] * 5000},
    {"prompt": [[3]] * 5000},
    {"prompt": "a " * 100_000},
    {"repetition_penalty": 1e-300},
    {"presence_penalty": 1e300},
    {"truncate_prompt_tokens": 10**9},
    {"structured_outputs": {"regex": "(a{1,9999}){1,9999}"}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "(((" * 100}}},
    {"structured_outputs": {"grammar": "start: start start"}},
    {"structured_outputs": {"choice": ["a" * 1000] * 1000}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": list(range(10_000))}}}},
    {"cache_salt": "s" * 10**6},
    {"metadata": {str(i): "x" for i in range(10_000)}},
]


def test_costly_parameters_cost_nothing(server: Running) -> None:
    process = psutil.Process()
    post = server.client.post
    base: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
    with Healthy(server):
        for extra in COSTLY[:3]:  # modules are loaded once
            post("/v1/completions", json=base | extra)
        before = process.memory_info().rss
        for extra in COSTLY:
            reply = post("/v1/completions", json=base | extra)
            assert reply.status_code in (200, 400, 413), (next(iter(extra)), reply.text[:300])
            assert len(reply.content) < 100_000, "an error must not echo what came"
        assert process.memory_info().rss - before < 200 * 2**20


# The prefix cache


def test_the_cache_tells_nothing_and_keeps_shares(guarded: Running) -> None:
    def cached(prompt: list[int], key: str, **extra: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **extra}
        reply = guarded.client.post("/v1/completions", json=body, headers={"x-api-key": key})
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    prompt = [11] * 41
    assert [cached(prompt, "alpha") for _ in range(2)] == [0, 40]
    assert cached(prompt, "beta") == 0
    assert [cached(prompt, "alpha", cache_salt="s") for _ in range(2)] == [0, 40]
    assert cached(prompt, "alpha", cache_salt=json.dumps(["acme", None])) == 0
    assert cached(prompt, "beta", cache_salt="s") == 0
    for number in range(60):  # some 2,400 pages, where the pool has 256
        cached([20 + number] * 161, "beta", cache_salt=str(number))
    assert cached(prompt, "alpha") == 40


# What the server says


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.ERROR])
def test_prompts_and_keys_are_told_nobody(
    hashed: Engine, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], level: int, tmp_path: Path
) -> None:
    caplog.set_level(level)
    file = tmp_path / "keys"
    file.write_text(f"{CANARY}-tenant:{CANARY}-key\n")
    with running(hashed, api_key_file=file) as server:
        post, headers = server.client.post, {"x-api-key": f"{CANARY}-key"}
        bodies: list[Any] = [
            {"prompt": CANARY, "max_tokens": 2},
            {"prompt": CANARY, "max_tokens": 2, "stream": True},
            {"prompt": CANARY, "n": "x"},
            {"prompt": [CANARY, 1]},
            {"prompt": CANARY, "guided_json": 1},
        ]
        texts = [post("/v1/completions", json=body, headers=headers).text for body in bodies]
        texts += [post("/v1/completions", content=CANARY.encode() * 9, headers=headers).text]
        chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 1}
        post("/v1/chat/completions", json=chat, headers=headers)
        texts.append(post("/v1/completions", json=bodies[0], headers={"x-api-key": f"{CANARY}-wrong"}).text)
        texts.append(server.client.get("/metrics", headers=headers).text)
    assert CANARY not in texts[-1] + texts[-2] + texts[-3]
    assert CANARY not in caplog.text
    assert CANARY not in "".join(capfd.readouterr())
    assert str(Path(jaxserve.__file__).parent) not in "".join(texts)


# Limits of requests


def test_headers_have_limits(server: Running) -> None:
    get = server.client.get
    assert get("/health", headers={f"x-{i}": "y" for i in range(200)}).status_code == 200
    assert get("/health", headers={f"x-{i}": "y" for i in range(300)}).status_code == 431
    assert get("/health", headers={"x": "y" * 60_000}).status_code == 200
    assert get("/health", headers={"x": "y" * 66_000}).status_code == 431
    endless = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10**6
    assert exchange(server.url, endless).split()[1] == b"431"


def test_slow_headers_end_a_connection(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    for first in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):  # the second request of a connection, too
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            if first:
                sock.sendall(first)
                reply = b""
                while not reply.endswith(b'{"status": "ok"}'):  # its parts may come one by one
                    part = sock.recv(4096)
                    assert part, reply
                    reply += part
                assert b" 200 " in reply
            sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"prompt": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", 400),
        (b'{"prompt": [' + b"[]," * 400_000 + b"[]]}", 413),
        (b'{"prompt": "' + b"[" * 400_000 + b'", "max_tokens": 1}', 400),  # longer than the model's sequences
        (b'{"prompt": [' + b"5, " * 400_000 + b"5]}", 400),
    ],
)
def test_bodies_are_bounded_while_others_go_on(
    server: Running, body: bytes, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "MAX_ITEMS", 10_000)  # checked functions take long
    with Healthy(server, 60):
        reply = server.client.post("/v1/completions", content=body)
    assert reply.status_code == code, reply.text
    assert re.search("nested|values|max_model_len", reply.text)


def test_other_origins_need_the_option(guarded: Running, hashed: Engine) -> None:
    origin = {"origin": "https://chat.example.org"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert guarded.client.options("/v1/completions", headers=asked).status_code == 401
    assert "access-control-allow-origin" not in guarded.client.get("/health", headers=origin).headers
    with running(hashed, api_key=["alpha"], allowed_origins=["https://chat.example.org"]) as server:
        reply = server.client.options("/v1/completions", headers=asked)
        assert (reply.status_code, reply.headers["access-control-allow-headers"]) == (204, "authorization")
        assert reply.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert server.client.get("/v1/models", headers=origin).status_code == 401
        headers = server.client.get("/v1/models", headers=origin | KEY).headers
        assert headers["access-control-allow-origin"] == "https://chat.example.org"
        other = {"origin": "https://evil.example.org"}
        for site, code in ((origin, 400), (other, 403)):  # a page need not ask first to send text
            reply = server.client.post(
                "/v1/completions", content="{", headers=site | KEY | {"sec-fetch-site": "cross-site"}
            )
            assert reply.status_code == code
        assert "access-control-allow-origin" not in server.client.get("/health", headers=other).headers
        assert server.client.options("/v1/completions", headers=asked | other).status_code == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_no_key_goes_before_others(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, path: str) -> None:
    file = tmp_path / "keys"
    file.write_text("acme:alpha\nother:beta min_priority=-1 max_priority=1\n")
    engine = hashed_engine(write_model(tmp_path_factory.mktemp("model")), scheduling_policy="priority")
    messages = [{"role": "user", "content": "a"}]
    body = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, {"messages": messages})
    body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    with running(engine, api_key_file=file, objectives=["critical=-5"]) as server:

        def status(key: str, priority: int | None = None, objective: str | None = None) -> int:
            headers = {"x-api-key": key} | ({"x-llm-d-inference-objective": objective} if objective else {})
            own = {} if priority is None else {"priority": priority}
            return server.client.post(path, json=body | own, headers=headers).status_code

        assert [status("alpha", priority) for priority in (None, 0, -1, 1, -1_000_000)] == [200, 200, 403, 403, 403]
        assert [status("beta", priority) for priority in (None, -1, 1, -2)] == [200, 200, 200, 403]
        assert status("alpha", objective="critical") == 403, "headers are the client's as well"

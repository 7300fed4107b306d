"""The page of the server: in a browser, and what it calls without one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.server.info import PAGE
from tests.server.browser import PATH, Browser
from tests.server.conftest import Running, running
from tests.server.hashed_engine import hashed_engine, write_model

SEND = """{
    document.getElementById("prompt").value = %r; document.getElementById("kind").value = %r;
    document.getElementById("tokens").value = %d; document.getElementById("form").requestSubmit(); 1 }"""
PICK = """{
    const files = new DataTransfer(); files.items.add(new File(["GIF89a"], "a.gif", { type: "image/gif" }));
    const picture = document.getElementById("picture"); picture.files = files.files;
    picture.dispatchEvent(new Event("change")); 1 }"""
SETTLED = "!document.getElementById('send').disabled && document.getElementById('facts').textContent"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = hashed_engine(write_model(tmp_path_factory.mktemp("model")), step_s=0.002)
    with running(engine, api_key=["secret"], served_model_name=["tiny"]) as server:
        yield server


@pytest.mark.long
def test_the_page_is_self_contained_and_calls_what_there_is(server: Running) -> None:
    reply = server.client.get("/")
    text = reply.text
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    called = {f"/{path}" for path in re.findall(r'fetch\("([^"]+)"', text)}
    called = {"/v1/completions" if path == "/v1/" else path for path in called}
    assert called == {"/ready", "/metrics", "/v1/models", "/v1/completions"}
    known = {path for _, path in server.app._handlers}
    assert called | {f"/v1/{kind}" for kind in re.findall(r'<option value="([^"]+)"', text)} <= known
    metrics = server.client.get("/metrics", headers={"x-api-key": "secret"}).text
    names = re.findall(r'read\("([^"]+)"\)', text)
    assert len(names) == 4
    for name in names:
        assert re.search(rf"^{name}\{{.*\}} (.*)$", metrics, re.MULTILINE), name
    assert PAGE.stat().st_size < 20_000


@pytest.mark.skipif(PATH is None, reason="Chromium is not installed; the test above covers what the page calls")
def test_the_page_works_in_a_browser(server: Running, tmp_path: Path) -> None:
    browser = Browser(tmp_path, server.url)
    try:
        browser.until("document.getElementById('state').textContent == 'ready, a key is needed'")
        browser.run(SEND % ("a b", "completions", 5))
        assert "API key" in browser.until("document.querySelector('#reply .error')?.textContent")
        browser.run("document.getElementById('key').value = 'secret'")
        browser.until("document.getElementById('model').textContent == 'tiny'")
        for kind in ("completions", "chat/completions"):
            browser.run(SEND % ("a b", kind, 40))
            facts = browser.until(SETTLED)
            assert facts.startswith(("40 tokens in", "1")), facts
            assert browser.run("document.querySelector('#reply .text').textContent.length") > 0
            assert browser.run("document.querySelectorAll('#reply .error').length") == 0
        browser.run(PICK)
        assert browser.run("document.getElementById('kind').value") == "chat/completions"
        browser.run(SEND % ("a b", "chat/completions", 5))
        assert "unsupported type 'image_url'" in browser.until("document.querySelector('#reply .error')?.textContent")
        browser.run(SEND % ("a b", "completions", 200))
        browser.until("document.querySelector('#reply .text').textContent")
        browser.run("document.getElementById('stop').click()")
        assert browser.until(SETTLED) == "stopped"
        browser.until("+document.getElementById('rate').textContent >= 0")
        assert browser.run("document.getElementById('pool').textContent").endswith("%")
        assert browser.run("document.getElementById('rates').getAttribute('points')")
        # requests above without a key, and with a picture for a model of text
        refused = [m for m in browser.messages if re.search("status of 40[01] ", str(m))]
        assert len([m for m in refused if "status of 400 " in str(m)]) == 1
        assert browser.messages == refused
        assert browser.screenshot().startswith(b"\x89PNG")
    finally:
        browser.close()

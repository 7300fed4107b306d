"""A server on loopback over a tiny engine, started once for all tests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.offline.llm import LLM
from jaxserve.server.app import App
from jaxserve.server.config import ServerConfig
from jaxserve.server.serve import new_server
from jaxserve.server.sockets import listen
from tests.e2e.conftest import llama
from tests.e2e.sizes import SIZES
from tests.soon_compiled import as_shipped

__all__ = ["llama"]


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: its address.
        app: its application.
        engine: its engine.
        client: plain client.
        stop: function that does what a first SIGTERM does.
    """

    url: str
    app: App
    engine: Engine
    client: httpx.Client
    stop: Callable[[], None]


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Running]:
    """Yield a server over an engine, and stop it."""
    config = ServerConfig(port=0, **{"shutdown_timeout_s": 0.5} | options)
    started, urls = threading.Event(), []

    def on_start(url: str) -> None:
        urls.append(url)
        started.set()

    with listen(config) as sock:
        app = App(engine, config)
        server = new_server(app, config, sock, on_start)
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        assert started.wait(30)
        try:
            with httpx.Client(base_url=urls[0], timeout=60) as client:
                yield Running(urls[0], app, engine, client, lambda: server.handle_exit(15, None))
                check_drained(engine)
        finally:
            server.handle_exit(15, None)
            thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def engine(llama: Path) -> Engine:
    """Return the engine of the servers."""
    with as_shipped():
        engine = Engine(EngineConfig(str(llama), **SIZES))
    engine.wait_until_warm()
    return engine


@pytest.fixture(scope="session")
def llm(llama: Path) -> LLM:
    """Return the offline interface over an engine of its own, with the same weights and programs."""
    with as_shipped():
        return LLM(str(llama), **SIZES)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    """Return a server without keys."""
    with running(engine, served_model_name=["tiny", "alias"]) as server:
        yield server


def check_drained(engine: Engine) -> None:
    """Check that no request is left, and that no page is lost."""
    for _ in range(200):
        if not engine.host.driver.has_work() and not engine.frontend.has_unfinished():
            break
        threading.Event().wait(0.02)
    assert not engine.host.driver.has_work()
    if engine.host.problem is None:
        engine.check_integrity()


@pytest.fixture(autouse=True)
def drained(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after every test that its engine is drained."""
    yield
    if "engine" in request.fixturenames:
        check_drained(request.getfixturevalue("engine"))

"""Joules in headers: all replies and idle time add up to the meter's count."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api.config import EngineConfig
from jaxserve.assembly import host
from jaxserve.assembly.engine import Engine
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens
from tests.server.conftest import Running, check_drained, running
from tests.soon_compiled import as_shipped

WATTS, GRAMS_PER_KWH = 10.0, 360.0


class TenWatts:
    """A meter that counts ten joules a second, and remembers its first and latest readings."""

    scope, max_interval_s = "a fake", float("inf")

    def __init__(self) -> None:
        self._start_s, self.first_j, self.latest_j = time.monotonic(), 0.0, 0.0

    def read_j(self) -> float:
        self.latest_j = WATTS * (time.monotonic() - self._start_s)
        self.first_j = self.first_j or self.latest_j
        return self.latest_j


@pytest.fixture(scope="module")
def metered(llama: Path) -> Iterator[tuple[Running, TenWatts]]:
    """Return a server and the meter of its engine."""
    meter = TenWatts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "find_meter", lambda name, platform: meter)
        with as_shipped():
            engine = Engine(EngineConfig(str(llama), **SIZES, energy_meter="auto", carbon_intensity=GRAMS_PER_KWH))
    engine.wait_until_warm()
    with running(engine, served_model_name=["tiny"]) as server:
        yield server, meter
    engine.close()


def joules_by_use(server: Running) -> dict[str, float]:
    """Return the joules for requests and for idle time in the server's metrics."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    (family,) = [each for each in families if each.name == "jaxserve:energy_joules"]
    return {sample.labels["use"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def test_headers_and_idle_time_have_all_joules_of_the_meter(metered: tuple[Running, TenWatts]) -> None:
    """Whole replies of one and several samples arrive together, with pauses in which nothing runs."""
    server, meter = metered
    before = joules_by_use(server)

    def ask(number: int) -> Any:
        body: dict[str, Any] = {"prompt": tokens(5 + 3 * number, number), "max_tokens": 4 + number, "ignore_eos": True}
        reply = server.client.post("/v1/completions", json=body | {"n": 1 + number % 2, "seed": number})
        assert reply.status_code == 200, reply.text
        return reply.headers

    headers = []
    with ThreadPoolExecutor(4) as pool:
        for first in (0, 4):
            headers += pool.map(ask, range(first, first + 4))
            time.sleep(0.05)
    joules = [float(each["x-energy-joules"]) for each in headers]
    check_drained(server.engine)
    after = joules_by_use(server)
    assert min(joules) > 0
    assert sum(joules) == pytest.approx(after["requests"] - before["requests"], rel=1e-4)
    assert after["idle"] > before["idle"]
    assert sum(after.values()) == pytest.approx(meter.latest_j - meter.first_j), "each step reads the meter"
    for each, value in zip(headers, joules, strict=True):
        assert float(each["x-co2-grams"]) == pytest.approx(value * GRAMS_PER_KWH / 3.6e6, rel=1e-4)


def test_replies_have_no_headers_without_a_meter(server: Running) -> None:
    reply = server.client.post("/v1/completions", json={"prompt": tokens(5, 1), "max_tokens": 2})
    assert not {"x-energy-joules", "x-co2-grams"} & reply.headers.keys()

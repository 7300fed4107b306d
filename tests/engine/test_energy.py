"""Energy: all joules of a meter go to requests or to idle time; counters wrap; a missing meter is None."""

import dataclasses
import pickle
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from simulation import SimulatedExecutor, make_request

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import Energy, EngineStats, co2_g
from jaxserve.core.core import EngineCore
from jaxserve.core.deltas import Delta
from jaxserve.core.energy import EnergyAccount
from jaxserve.core.events import Cancelled, Submitted
from jaxserve.core.process_messages import pack_delta, unpack_delta
from jaxserve.core.replica import Replica
from jaxserve.errors import ConfigError
from jaxserve.scheduling.request import FinishReason, Request
from jaxserve.system.meter import NvmlMeter, RaplMeter, find_meter
from tests.driven_core import ARCH, LARGER

WATTS = 10.0


class TenWatts:
    """A meter whose clock is the test's."""

    scope, max_interval_s = "a fake", float("inf")

    def __init__(self) -> None:
        self.now_s = 0.0

    def read_j(self) -> float:
        return WATTS * self.now_s


class TimedExecutor(SimulatedExecutor):
    """A device whose steps last as long as they have tokens, on the meter's clock."""

    def __init__(self, meter: TenWatts) -> None:
        super().__init__(LARGER)
        self.meter, self.free_s, self.busy_s = meter, 0.0, 0.0

    def launch(self, plan, program):
        step = super().launch(plan, program)
        step.launched_s = self.meter.now_s
        start_s = max(self.free_s, self.meter.now_s)
        self.free_s = start_s + 0.01 + 0.001 * plan.num_tokens
        self.busy_s += self.free_s - start_s
        result, ended_s = step.result, self.free_s

        def ended():
            self.meter.now_s = max(self.meter.now_s, ended_s)
            return dataclasses.replace(result(), ended_s=ended_s)

        step.result = ended
        return step


def fail(error: BaseException) -> None:
    raise AssertionError from error


class UnreadableAtTimes(TenWatts):
    """A meter of which every third reading fails."""

    num_readings = 0

    def read_j(self) -> float:
        self.num_readings += 1
        if self.num_readings % 3 == 0:
            raise OSError("no such device")
        return super().read_j()


def serve(
    arrivals: list[tuple[float, int, int]], *, cancels: bool = False, new_meter: type[TenWatts] = TenWatts
) -> tuple[list[float], TimedExecutor, Energy]:
    """Serve requests, each with its arrival and lengths; return their joules, the device and the totals."""
    meter, stats = new_meter(), EngineStats()
    executor = TimedExecutor(meter)
    account = EnergyAccount(meter, stats, 0.0)
    replica = Replica(EngineConfig("none", multi_step=1), ARCH, executor, stats, energy=account)
    core = EngineCore([replica], step_ahead=True, on_failure=fail)
    requests: list[Request] = []
    joules: dict[int, float] = {}
    due = sorted(arrivals)
    while due or core.has_work():
        while due and (due[0][0] <= meter.now_s or not core.has_work()):
            at_s, prompt_len, output_len = due.pop(0)
            meter.now_s = max(meter.now_s, at_s)
            request = make_request(f"{len(requests)}#0", [1 + len(requests)] * prompt_len, output_len)
            request.key = len(requests)
            requests.append(request)
            core.inbox.append(Submitted([request]))
            if cancels and len(requests) % 3 == 0:
                core.inbox.append(Cancelled([request.key - 1], FinishReason.ABORT))
        core.step(meter.now_s)
        while core.outbox:
            delta = unpack_delta(pickle.loads(pickle.dumps(pack_delta(core.outbox.popleft()))))
            assert isinstance(delta, Delta)
            if delta.step is not None:
                joules |= dict(zip(delta.step.keys, delta.step.energy_j, strict=True))
    return [joules.get(key, 0.0) for key in range(len(requests))], executor, stats.energy


def test_all_joules_go_to_requests_or_idle_time() -> None:
    draw = Random(3)
    arrivals = [(draw.random() * 3, draw.randrange(1, 30), draw.randrange(1, 12)) for _ in range(25)]
    for cancels in (False, True):
        joules, executor, energy = serve(arrivals, cancels=cancels)
        assert energy.total_j == pytest.approx(WATTS * executor.meter.now_s)
        assert sum(joules) == pytest.approx(energy.requests_j)
        if not cancels:
            assert energy.requests_j == pytest.approx(WATTS * executor.busy_s)
            assert min(joules) > 0


def test_a_request_alone_has_the_energy_of_its_steps_and_equal_ones_have_equal_energy() -> None:
    alone, executor, energy = serve([(5.0, 20, 6)])
    assert alone == [pytest.approx(WATTS * executor.busy_s)]
    assert energy.idle_j == pytest.approx(WATTS * 5.0)
    both, executor, _ = serve([(0.0, 12, 6), (0.0, 12, 6)])
    assert both[0] == pytest.approx(both[1], rel=1e-6)
    assert sum(both) == pytest.approx(WATTS * executor.busy_s)
    (short, long), _, _ = serve([(0.0, 2, 2), (0.0, 30, 2)])
    assert long > 2 * short


def test_a_meter_that_cannot_be_read_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    joules, executor, energy = serve([(0.0, 12, 12), (0.0, 12, 11)], new_meter=UnreadableAtTimes)
    assert min(joules) > 0
    assert WATTS * executor.busy_s / 2 < energy.total_j <= WATTS * executor.meter.now_s
    assert caplog.text.count("no such device") == 1


def test_rapl_counters_wrap(tmp_path: Path) -> None:
    names = {"0": "package-0", "1": "package-1", "0:0": "core", "2": "psys"}
    zones = [tmp_path / f"intel-rapl:{number}" for number in names]
    for zone, name in zip(zones, names.values(), strict=True):
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("1000000\n")
        (zone / "energy_uj").write_text("900000\n")
    meter = RaplMeter(tmp_path)
    (zones[0] / "energy_uj").write_text("100000\n")  # wrapped
    (zones[1] / "energy_uj").write_text("950000\n")
    (zones[2] / "energy_uj").write_text("999999\n")  # a part of the first
    (zones[3] / "energy_uj").write_text("999999\n")  # the whole machine
    assert meter.read_j() == pytest.approx(0.25)
    (zones[0] / "energy_uj").write_text("50000\n")  # wrapped again
    assert meter.read_j() == pytest.approx(1.2)
    with pytest.raises(ConfigError, match="intel-rapl"):
        RaplMeter(tmp_path / "missing")


def test_nvml_counters_are_added_and_a_missing_meter_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [5000, 7000]
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetTotalEnergyConsumption=lambda index: counters[index],
        ),
    )
    meter = find_meter("auto", "gpu")
    assert isinstance(meter, NvmlMeter)
    counters[:] = 6000, 7500
    assert meter.read_j() == 1.5
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_meter("auto", "gpu") is None
    assert find_meter("auto", "tpu") is None
    assert find_meter(None, "gpu") is None
    with pytest.raises(ConfigError, match="nvidia-ml-py"):
        find_meter("nvml", "gpu")
    assert (EngineStats().energy.total_j, co2_g(None, 400.0), co2_g(3.6e6, None)) == (None, None, None)
    assert co2_g(3.6e6, 400.0) == 400.0

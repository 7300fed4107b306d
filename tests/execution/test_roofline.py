"""Peak rates of a device: measured once, kept, and never trusted blindly."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.api.metrics import PeakRates
from jaxserve.execution import roofline
from jaxserve.execution.roofline import describe_device, device_peak_rates

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes measured so far; each measurement finds its own number of GFLOP/s, and less bandwidth every time."""
    done: list[str] = []

    def measure(dtype: jnp.dtype) -> PeakRates:
        done.append(dtype.name)
        return PeakRates(1e9 * len(done), 1e8 / len(done))

    monkeypatch.setattr(roofline, "measure_peak_rates", measure)
    return done


def test_the_best_of_a_few_measurements_counts(tmp_path: Path, measured: list[str]) -> None:
    seen = [device_peak_rates(FLOAT32, tmp_path / "new") for _ in range(roofline.NUM_MEASUREMENTS + 2)]
    best = PeakRates(1e9 * roofline.NUM_MEASUREMENTS, 1e8)
    assert seen[0] == PeakRates(1e9, 1e8)
    assert seen[-3:] == [best, best, best]
    assert len(measured) == roofline.NUM_MEASUREMENTS
    device_peak_rates(BFLOAT16, tmp_path / "new")
    assert measured[-1] == "bfloat16"
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".json"}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"flops_per_s": 1}', '{"flops_per_s": 0.0, "bytes_per_s": 1.0, "num_measurements": 9}'],
)
def test_a_broken_file_is_measured_anew(tmp_path: Path, measured: list[str], content: str) -> None:
    device_peak_rates(FLOAT32, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert device_peak_rates(FLOAT32, tmp_path) == PeakRates(2e9, 5e7)
    assert json.loads(path.read_text()) == {"flops_per_s": 2e9, "bytes_per_s": 5e7, "num_measurements": 1}


def test_other_devices_and_versions_have_files_of_their_own(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device_peak_rates(FLOAT32, tmp_path)
    monkeypatch.setattr(roofline.jax, "__version__", "99.0")
    device_peak_rates(FLOAT32, tmp_path)
    monkeypatch.setattr(roofline, "describe_device", lambda: roofline.Device("gpu", "NVIDIA H200", 8, 16))
    device_peak_rates(FLOAT32, tmp_path)
    assert len(measured) == len(list(tmp_path.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert device_peak_rates(FLOAT32, tmp_path / "file") == PeakRates(1e9, 1e8)
    assert "cannot be kept" in caplog.text


def test_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEASURE_S", 0)
    peak_rates = roofline.measure_peak_rates(FLOAT32)
    assert 1e8 < peak_rates.flops_per_s < 1e16
    assert 1e8 < peak_rates.bytes_per_s < 1e14
    device = describe_device()
    assert device.kind
    assert device.count >= 1
    assert device.num_cores >= 1


def test_cores_are_counted_on_systems_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(roofline.os, "sched_getaffinity")
    monkeypatch.setattr(roofline.os, "cpu_count", lambda: 10)
    assert describe_device().num_cores == 10
    monkeypatch.setattr(roofline.os, "cpu_count", lambda: None)
    assert roofline.num_cores() == 1

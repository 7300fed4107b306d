"""The device in use and its peak rates, measured and then kept in the user's cache directory."""

import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.api.metrics import PeakRates
from jaxserve.layers.linear import linear
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.pallas_kernels import packed_linear
from jaxserve.system.environment import user_cache_dir
from jaxserve.system.whole_file import write_whole

Call = Callable[[], jax.Array]

logger = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2  # so that dispatch overlaps with the device, as while serving
NUM_MEASUREMENTS = 3  # each by another process
MEASURE_S = 0.15  # per rate, after compiling and one round


@dataclass(frozen=True)
class Device:
    """Device that the engine runs on."""

    platform: str
    kind: str
    count: int
    num_cores: int  # host cores available to this process


def describe_device() -> Device:
    """Return the first device of jax's default backend; a CPU by its model, which jax does not report."""
    device = jax.devices()[0]
    kind = _cpu_model() if device.platform == "cpu" else device.device_kind
    return Device(device.platform, kind, jax.device_count(), num_cores())


def num_cores() -> int:
    """Return the number of cores available to this process; all cores if the system does not report it (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_peak_rates(dtype: jnp.dtype, cache_dir: Path | None = None) -> PeakRates:
    """Return this device's peak rates in `dtype`, from the cache or measured in under a second on a quiet machine.

    Other load makes a machine look slower, never faster. The first NUM_MEASUREMENTS processes therefore measure, and
    the best result is kept.

    Args:
        dtype: dtype of weights and activations.
        cache_dir: directory of the measurements, one file each; None for the user's. If processes measure
            simultaneously, the last one's file remains.
    """
    path = (cache_dir or user_cache_dir() / "peak_rates") / f"{_cache_key(describe_device(), dtype)}.json"
    kept, num_measured = _read(path) or (None, 0)
    if kept is None or num_measured < NUM_MEASUREMENTS:
        kept = best_rates(kept, measure_peak_rates(dtype))
        _write(path, kept, num_measured + 1)
    return kept


def measure_peak_rates(dtype: jnp.dtype) -> PeakRates:
    """Measure a large matmul, and reads of an array larger than any cache, by XLA or a native kernel."""
    on_cpu = jax.default_backend() == "cpu"
    M, D, F = (1024, 1024, 2048) if on_cpu else (4096, 4096, 8192)
    num_rows = (1 << 27 if on_cpu else 1 << 29) // dtype.itemsize // D
    flops_per_s = _best_rate(2 * M * D * F, _matmul_calls(jnp.ones((F, D), dtype), jnp.ones((M, D), dtype)))
    array = jnp.ones((num_rows, D), dtype)
    readers = [*_matmul_calls(array, jnp.ones((1, D), dtype)), lambda: _largest(array)]
    return PeakRates(flops_per_s, _best_rate(array.nbytes, readers))


def best_rates(kept: PeakRates | None, new: PeakRates) -> PeakRates:
    """Return the higher rates of two measurements."""
    if kept is None:
        return new
    return PeakRates(max(kept.flops_per_s, new.flops_per_s), max(kept.bytes_per_s, new.bytes_per_s))


_matmul = jax.jit(linear)
_largest = jax.jit(jnp.max)


def _matmul_calls(weight: jax.Array, x: jax.Array) -> list[Call]:
    """Return functions that compute `x @ weight.T`: by XLA, and by a native kernel if there is one for this dtype."""
    calls: list[Call] = [lambda: _matmul(x, weight)]
    if packed_linear.unsupported(weight.dtype, jax.default_backend()) is None:
        packed = NativeMatrix(packed_linear.pack(weight))
        calls.append(lambda: _matmul(x, packed))
    return calls


def _best_rate(work: int, calls: Sequence[Call]) -> float:
    """Return the rate of the fastest call: `work`, such as a number of bytes, per second."""
    return work / min(map(_best_seconds, calls))


def _best_seconds(call: Call) -> float:
    """Measure a call several times, after compiling it, and return its shortest time in seconds."""
    call().block_until_ready()  # compiles
    deadline = time.perf_counter() + MEASURE_S
    best_s = _time_calls(call)
    while time.perf_counter() < deadline:
        best_s = min(best_s, _time_calls(call))
    return best_s / CALLS_IN_FLIGHT


def _time_calls(call: Call) -> float:
    """Return the seconds that CALLS_IN_FLIGHT overlapping calls take together."""
    started = time.perf_counter()
    jax.block_until_ready([call() for _ in range(CALLS_IN_FLIGHT)])
    return time.perf_counter() - started


def _cache_key(device: Device, dtype: jnp.dtype) -> str:
    """Return the name of the file with a device's peak rates in `dtype`, without its suffix."""
    parts = (device.kind, f"x{device.count}", f"{device.num_cores} cores", f"jax {jax.__version__}", dtype.name)
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)


def _read(path: Path) -> tuple[PeakRates, int] | None:
    """Return the best rates so far and the number of measurements; None without a usable file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        peak_rates = PeakRates(float(content["flops_per_s"]), float(content["bytes_per_s"]))
        num_measured = int(content["num_measurements"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (peak_rates, num_measured) if min(peak_rates.flops_per_s, peak_rates.bytes_per_s) > 0 else None


def _write(path: Path, peak_rates: PeakRates, num_measured: int) -> None:
    """Write the best rates so far and the number of measurements; warn if that is impossible."""
    content = {**asdict(peak_rates), "num_measurements": num_measured}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content).encode())
    except OSError as error:
        logger.warning("the device's peak rates cannot be kept, and are measured again next time: %s", error)


def _cpu_model() -> str:
    """Return the model name of the host's processor, or else its architecture."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()

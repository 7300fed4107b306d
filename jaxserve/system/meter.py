"""Energy meters: joules that this machine's processor or GPUs have consumed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxserve.errors import ConfigError

METERS = ("auto", "nvml", "rapl")
POWERCAP = Path("/sys/class/powercap")


@runtime_checkable
class Meter(Protocol):
    """An energy source.

    Attributes:
        scope: devices whose energy it measures, in words.
        max_interval_s: maximum seconds between two readings, so that no wrap of a counter is missed.
    """

    scope: str
    max_interval_s: float

    def read_j(self) -> float:
        """Return the joules consumed since the meter was created."""


class RaplMeter:
    """Intel's and AMD's energy counters of processor packages, which wrap around.

    Args:
        root: folder with the kernel's power capping zones.

    Raises:
        ConfigError: there are none, or this user may not read them.
    """

    max_interval_s = 60.0  # 2**32 units, 15 microjoules each, wrap after three minutes at 350 W

    def __init__(self, root: Path = POWERCAP) -> None:
        # A package is intel-rapl:0; intel-rapl:0:0 is a part of it, and a zone named psys is the whole machine, with
        # the packages. AMD processors have the same names.
        self._zones = sorted(path for path in root.glob("intel-rapl:*") if _is_package(path))
        if not self._zones:
            raise ConfigError(f"the meter rapl needs zones intel-rapl:* of packages in {root}, and there are none")
        try:
            self._ranges_uj = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
            self._latest_uj = [self._counter_uj(zone) for zone in self._zones]
        except (OSError, ValueError) as error:
            raise ConfigError(f"the meter rapl needs permission to read {root}/*/energy_uj: {error}") from error
        self.scope = f"{len(self._zones)} processor package{'s' if len(self._zones) > 1 else ''}"
        self._total_uj = 0
        self._lock = threading.Lock()

    def read_j(self) -> float:
        """Return the joules consumed since the meter was created."""
        with self._lock:
            for index, zone in enumerate(self._zones):
                now_uj = self._counter_uj(zone)
                passed_uj = now_uj - self._latest_uj[index]
                self._total_uj += passed_uj if passed_uj >= 0 else passed_uj + self._ranges_uj[index]
                self._latest_uj[index] = now_uj
            return self._total_uj / 1e6

    @staticmethod
    def _counter_uj(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())


def _is_package(zone: Path) -> bool:
    """Return whether a power capping zone is a processor package."""
    try:
        return zone.name.count(":") == 1 and (zone / "name").read_text().startswith("package")
    except OSError:
        return False


class NvmlMeter:
    """NVIDIA's energy counters of GPUs, since Volta.

    Args:
        indices: NVML's GPU indices; None for all.

    Raises:
        ConfigError: the package nvidia-ml-py or the driver is missing, or a GPU has no counter.
    """

    max_interval_s = float("inf")  # 64-bit counters

    def __init__(self, indices: Sequence[int] | None = None) -> None:
        try:
            import pynvml  # noqa: PLC0415 - an extra

            self._nvml: Any = pynvml
            pynvml.nvmlInit()
            wanted = range(pynvml.nvmlDeviceGetCount()) if indices is None else indices
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in wanted]
            self._start_mj = self._counters_mj()
        except Exception as error:  # NVML has its own error classes
            raise ConfigError(f"the meter nvml needs nvidia-ml-py and a GPU with an energy counter: {error}") from error
        if not self._handles:
            raise ConfigError("the meter nvml needs a GPU, and there is none")
        self.scope = f"{len(self._handles)} GPU{'s' if len(self._handles) > 1 else ''}"

    def read_j(self) -> float:
        """Return the joules consumed since the meter was created."""
        return (self._counters_mj() - self._start_mj) / 1e3

    def _counters_mj(self) -> int:
        return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)


def find_meter(name: str | None, platform: str) -> Meter | None:
    """Return the meter with this name; None if no meter is wanted, or "auto" finds none.

    Args:
        name: a key in METERS; None for no meter.
        platform: the engine's jax platform, whose meter "auto" looks for.

    Raises:
        ConfigError: the meter named cannot be read.
    """
    if name is None:
        return None
    kinds: dict[str, type[RaplMeter | NvmlMeter]] = {"rapl": RaplMeter, "nvml": NvmlMeter}
    if name != "auto":
        return kinds[name]()
    found = {"cpu": "rapl", "gpu": "nvml"}.get(platform)  # TPUs report no energy
    try:
        return None if found is None else kinds[found]()
    except ConfigError:
        return None

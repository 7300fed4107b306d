"""Processor time used by other processes during a measurement."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTimes:
    """Processor time since the machine started, in clock ticks over all cores.

    Attributes:
        total: total processor time.
        busy: busy processor time.
        ours: processor time of this process and one process group.
    """

    total: int
    busy: int
    ours: int

    @classmethod
    def now(cls, group: int) -> "CpuTimes | None":
        """Return the current times; None without /proc (not Linux)."""
        if not (_PROC / "stat").exists():
            return None
        ticks = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle, and waiting for disks
        ours = sum(_ticks(fields) for pid, fields in _processes() if pid == os.getpid() or int(fields[2]) == group)
        return cls(sum(ticks), sum(ticks) - idle, ours)

    def cores_used(self, since: "CpuTimes") -> float:
        """Return the mean number of cores that we kept busy since an earlier time."""
        return (self.ours - since.ours) / max(1, self.total - since.total) * (os.cpu_count() or 1)

    def noise_share(self, since: "CpuTimes") -> float:
        """Return the fraction of processor time since an earlier time that other processes used."""
        others = (self.busy - since.busy) - (self.ours - since.ours)
        return max(0, others) / max(1, self.total - since.total)


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yield process ids and their stat fields after the name, from the state on (proc(5))."""
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()


def _ticks(fields: list[str]) -> int:
    """Return user and system time of a process and its ended children."""
    return sum(int(field) for field in fields[11:15])

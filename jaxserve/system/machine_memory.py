"""This machine's memory. On Linux no package is imported for it: that would take as long as reading small weights."""

import os
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")  # "max" without a limit, and missing outside of containers


def machine_bytes() -> int:
    """Return this machine's total memory."""
    return _meminfo_bytes("MemTotal", "total")


def available_bytes() -> int:
    """Return the memory that processes can still allocate without swapping."""
    return _meminfo_bytes("MemAvailable", "available")


def container_bytes() -> int:
    """Return the memory that processes in this container may use together: the machine's total if it sets no limit."""
    with suppress(OSError, ValueError):
        return min(int(_CONTAINER.read_text()), machine_bytes())
    return machine_bytes()


def _meminfo_bytes(line: str, attribute: str) -> int:
    """Return the bytes in a line of /proc/meminfo, or psutil's `attribute` without one."""
    if os.name == "posix" and _MEMINFO.exists():
        for each in _MEMINFO.read_text().splitlines():
            name, _, value = each.partition(":")
            if name == line:
                return int(value.split()[0]) << 10
    import psutil  # noqa: PLC0415 - see above

    return int(getattr(psutil.virtual_memory(), attribute))

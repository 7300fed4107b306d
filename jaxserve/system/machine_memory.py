"""This machine's memory. On Linux no package is imported for it: that would take as long as reading small weights."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def machine_bytes() -> int:
    """Return this machine's total memory."""
    return _meminfo_bytes("MemTotal", "total")


def available_bytes() -> int:
    """Return the memory that processes can still allocate without swapping."""
    return _meminfo_bytes("MemAvailable", "available")


def _meminfo_bytes(line: str, attribute: str) -> int:
    """Return the bytes in a line of /proc/meminfo, or psutil's `attribute` without one."""
    if os.name == "posix" and _MEMINFO.exists():
        for each in _MEMINFO.read_text().splitlines():
            name, _, value = each.partition(":")
            if name == line:
                return int(value.split()[0]) << 10
    import psutil  # noqa: PLC0415 - see above

    return int(getattr(psutil.virtual_memory(), attribute))

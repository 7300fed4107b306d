"""The embedded checkpoint's corpus: the running CPython's standard library, split by path."""

import hashlib
import sysconfig
from pathlib import Path

_SKIPPED = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_ONE_IN = 20


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def modules() -> list[Path]:
    """Return the paths of all modules, relative to the standard library, sorted; no tests, no installed packages."""
    root = stdlib_root()
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in paths if _SKIPPED.isdisjoint(path.parts))


def is_held_out(path: Path) -> bool:
    """Return whether a file is held out: one in twenty, by its path's hash, the same on every machine."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest(), 16) % _HELD_OUT_ONE_IN == 0


def read(*, held_out: bool) -> list[bytes]:
    """Return the modules' contents in one split, in path order."""
    root = stdlib_root()
    return [(root / path).read_bytes() for path in modules() if is_held_out(path) is held_out]


def as_text(module: bytes) -> str:
    """Decode UTF-8, as in nearly all modules; other bytes become U+FFFD."""
    return module.decode("utf-8", "replace")

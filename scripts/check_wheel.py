"""Check a wheel from a user's view: install it in a fresh environment without a compiler, complete a prompt, and serve.

    python -m build && python scripts/check_wheel.py dist/*.whl

The environment, in a temporary folder, has only packages from the registry. The prompt and its completion come from
README.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from check_docs import read_blocks

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "server,structured"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
START_S = 300
SETS = {"x86_64": ("generic", "avx2", "avxvnni", "avx512", "avx512vnni", "amx"), "aarch64": ("generic", "neondot")}
KERNELS = "import sys; from jaxserve.pallas_kernels import native; sys.exit(native.unavailable())"


def missing(wheel: Path) -> Iterator[str]:
    """Yield missing parts of a wheel: modules and data of the tree, and instruction sets of its kernels."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        library = archive.read(kernels) if (kernels := "jaxserve/pallas_kernels/native/_kernels.so") in names else b""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{key.replace('.', '/')}/{each}" for key, several in data.items() for each in several]
    for package in ("jaxserve", "pallas_kernels", "weights"):
        for path in (ROOT / package).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            name = name if package == "jaxserve" else f"jaxserve/{name}"
            is_data = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            is_built = path.name == "build_failure.txt" or "__pycache__" in path.parts
            if path.is_file() and not is_built and (path.suffix == ".py" or is_data) and name not in names:
                yield name
    if "linux" in wheel.name or "manylinux" in wheel.name:
        for instruction_set in next(sets for machine, sets in SETS.items() if machine in wheel.name):
            if f"{len(instruction_set)}{instruction_set}7kernelsE".encode() not in library:
                yield f"kernels for {instruction_set}"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of a user without a compiler or clone."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "sh", "env", "uname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))}
    found = kept | {"PATH": f"{folder / 'venv/bin'}:{programs}", "HOME": str(folder)}
    if compilers := [name for name in COMPILERS if shutil.which(name, path=found["PATH"])]:
        raise RuntimeError(f"the environment must have no compiler, and has {compilers}")
    return found


def example() -> tuple[str, str]:
    """Return the first command in README.md, and its output."""
    blocks = read_blocks((ROOT / "README.md").read_text())
    first = next(i for i, block in enumerate(blocks) if block.language == "bash" and block.reason is None)
    return blocks[first].code, blocks[first + 1].code


def serve_once(folder: Path, variables: dict[str, str]) -> str:
    """Start the server, complete a prompt over HTTP, end it, and return the text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([folder / "venv/bin/jaxserve", "serve", "--port", str(port)], cwd=folder, env=variables)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        body = json.dumps({"prompt": "def main(", "max_tokens": 8, "temperature": 0}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=START_S) as reply:
            return str(json.load(reply)["choices"][0]["text"])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    if lacking := list(missing(wheel)):
        sys.exit(f"{wheel.name} must have all modules, data and kernels, and lacks: {', '.join(lacking)}")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        variables = environment(folder)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        run = partial(subprocess.run, cwd=folder, env=variables, check=True)
        run([python, "-m", "pip", "install", "-q", f"{wheel}[{EXTRAS}]"])
        run([python, "-c", KERNELS])
        command, expected = example()
        shown = run(["bash", "-c", command], stdout=subprocess.PIPE, text=True).stdout
        if shown.strip() != expected.strip():
            sys.exit(f"README.md's first command must print\n{expected}\nand printed\n{shown}")
        print(shown)
        print(repr(serve_once(folder, variables)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

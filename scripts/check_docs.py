"""Check the documentation: run every command and snippet, and follow every link and path.

    python scripts/check_docs.py                  # all Markdown files of the repository
    python scripts/check_docs.py README.md        # some of them
    python scripts/check_docs.py --links          # links and paths only, within a second

Fenced blocks in `bash` and `python` run in a temporary folder that looks like a clone of the repository, where
`path/to/checkpoint` is the embedded model. First each bash block runs in a separate shell, then all Python blocks in a
file run in one process, as if they were one script. A block that cannot run here has a line right above it with the
reason:

    <!-- not run: needs a GPU -->

Links must lead to files and headings that exist; so must paths in code spans. Links to other sites are not followed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxserve", "pallas_kernels", "weights", "scripts", "tests")
LANGUAGES = ("bash", "python")
BLOCK_TIMEOUT_S = 600
TAIL_CHARS = 3000

_FENCE = re.compile(r"^ *```(\w*)\s*$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (.+) -->\s*$")
_LINK = re.compile(r"\]\(([^()\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.(?:py|cc|h|md|json|jsonl|toml|svg|png|sh))?")
_MODULE = re.compile(r"\w+\.(?:py|cc|h)")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: number of its first code line, from 1.
        language: language named after the fence.
        code: text between the fences.
        reason: reason why it is not run; None if it is.
    """

    line: int
    language: str
    code: str
    reason: str | None = None


def read_blocks(text: str) -> list[Block]:
    """Return the fenced blocks in a Markdown text.

    Raises:
        ValueError: a block is not closed.
    """
    blocks: list[Block] = []
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        if fence := _FENCE.match(lines[index]):
            end = next((i for i in range(index + 1, len(lines)) if lines[i].strip() == "```"), None)
            if end is None:
                raise ValueError(f"the block at line {index + 1} must end with ```, and the text ended")
            marker = _NOT_RUN.match(lines[index - 1]) if index else None
            code = "\n".join(lines[index + 1 : end]) + "\n"
            blocks.append(Block(index + 2, fence[1], code, marker[1] if marker else None))
            index = end
        index += 1
    return blocks


def broken_links(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield a message for each broken link or path in a Markdown file."""
    prose = _without_blocks(path.read_text())
    for link in _LINK.finditer(_CODE_SPAN.sub("", prose)):
        target = link[1] or link[2]
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        found = path.parent / name if name else path
        if not found.exists():
            yield f"there is no {name}, to which a link leads"
        elif anchor and (found.suffix != ".md" or anchor not in anchors(found.read_text())):
            yield f"{name or path.name} has no heading #{anchor}, to which a link leads"
    for span in _CODE_SPAN.finditer(prose):
        is_path = _PATH.fullmatch(span[1]) and not span[1].startswith("path/")
        if is_path and not any((folder / span[1]).exists() for folder in (root, path.parent, root / "jaxserve")):
            yield f"there is no {span[1]}"
        if _MODULE.fullmatch(span[1]) and not any(_find(root, span[1])):
            yield f"there is no {span[1]} in any folder"


def _find(root: Path, name: str) -> Iterator[Path]:
    """Yield the paths called `name` below any of FOLDERS in `root`."""
    for folder in FOLDERS:
        yield from (root / folder).rglob(name)


def anchors(text: str) -> set[str]:
    """Return GitHub's anchors for the headings in a Markdown text."""
    found: dict[str, int] = {}
    result = set()
    for heading in _HEADING.finditer(_without_blocks(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


def _without_blocks(text: str) -> str:
    """Return Markdown without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def markdown_files(root: Path = ROOT) -> list[Path]:
    """Return the repository's Markdown files."""
    nested = (path.resolve() for folder in FOLDERS for path in (root / folder).rglob("*.md"))
    return sorted({*root.glob("*.md"), *nested})


def run_file(path: Path, folder: Path) -> list[str]:
    """Run the blocks of a file in `folder`; return a message for each failing block."""
    blocks = [block for block in read_blocks(path.read_text()) if block.language in LANGUAGES]
    name, failures = path.relative_to(ROOT), []
    for block in blocks:
        if block.reason is not None:
            print(f"{name}:{block.line}: not run: {block.reason}", flush=True)
        elif block.language == "bash":
            failures += _run(["bash", "-euo", "pipefail", "-c", block.code], f"{name}:{block.line}", folder)
    if python := [block for block in blocks if block.language == "python" and block.reason is None]:
        script = folder / f"{name.stem}.py"
        script.write_text(one_script(python))
        where = f"{name}:{','.join(str(block.line) for block in python)}"
        failures += _run([sys.executable, str(script)], where, folder)
        script.unlink()
    return failures


def one_script(blocks: Sequence[Block]) -> str:
    """Return a script with all blocks, in which lines keep their numbers from the Markdown file."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def _run(command: Sequence[str], where: str, folder: Path) -> list[str]:
    """Run a command; return a message if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        code, output = f"exit code {done.returncode}" if done.returncode else None, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = f"no end within {BLOCK_TIMEOUT_S} s", str(error.output or "")
    print(f"{where}: {code or 'ok'}, {time.monotonic() - started:.1f} s", flush=True)
    return [f"{where}: {code}\n{output[-TAIL_CHARS:]}"] if code else []


def make_clone(folder: Path) -> None:
    """Make `folder` look like a clone in which commands may write; files that they read are links."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("scripts", "build"):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "scripts", folder / "scripts")  # scripts write next to themselves
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "checkpoint").symlink_to(ROOT / "weights" / "default")


def main() -> int:
    """Check the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="Markdown files (default: all of the repository)")
    parser.add_argument("--links", action="store_true", help="check links and paths only")
    args = parser.parse_args()
    files = [Path(name).resolve() for name in args.files] or markdown_files()
    failures = [f"{path.relative_to(ROOT)}: {message}" for path in files for message in broken_links(path)]
    for path in files if not args.links else []:
        with tempfile.TemporaryDirectory() as folder:
            make_clone(Path(folder))
            failures += run_file(path, Path(folder))
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    print(f"{len(files)} files, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Count docstrings, argument lines and trailing comments that begin without their head noun or verb.

    python scripts/check_prose.py                # shares of the whole tree; exit status 1 above 4 percent
    python scripts/check_prose.py --list PATH    # with the lines counted

A text counts that begins with a preposition, a relative pronoun or a conjunction ("Of a tile", "What is read"): its
reader has to guess what it is about. Comments on lines of their own are not counted.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_RELATIVES = "of that what whether which who whom whose those where when how why as than then"
_PREPOSITIONS = "for from in into on to with without by at within before after behind beyond between among like"
_CONJUNCTIONS = "if while until since likewise"
HEADLESS = frozenset(f"{_RELATIVES} {_PREPOSITIONS} {_CONJUNCTIONS}".split())
MAX_SHARE = 0.04
ROOT = Path(__file__).resolve().parent.parent
_SECTION = re.compile(r"(?:Args|Attributes):$")
_ENTRY = re.compile(r"    \*{0,2}\w+: (.+)")
_PRAGMA = re.compile(r"(?:type: ignore|noqa|pragma:|fmt:)")


class Text(NamedTuple):
    """One docstring, argument line or trailing comment."""

    kind: str
    path: Path
    line: int
    text: str

    @property
    def is_headless(self) -> bool:
        """Return whether the first word is one of `HEADLESS`."""
        words = re.findall(r"[A-Za-z]+", self.text[:40])
        return bool(words) and self.text[0].isalpha() and words[0].lower() in HEADLESS


def docstrings(path: Path, tree: ast.AST) -> Iterator[Text]:
    """Yield the first line of each docstring, and each entry of its sections of arguments and attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        first = 1 if isinstance(node, ast.Module) else node.body[0].lineno
        is_section = False
        for offset, line in enumerate(lines):
            is_section = bool(_SECTION.match(line)) or (is_section and (not line or line.startswith(" ")))
            if offset == 0:
                yield Text("docstrings", path, first, line)
            elif is_section and (entry := _ENTRY.match(line)):
                yield Text("arguments", path, first + offset, entry[1])


def trailing_comments(path: Path, source: str) -> Iterator[Text]:
    """Yield the comments that stand behind code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() and not _PRAGMA.match(text):
            yield Text("comments", path, token.start[0], text)


def texts(paths: list[Path]) -> Iterator[Text]:
    """Yield what is checked in Python files, and in those of folders."""
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for file in files:
            if any(part.startswith(".") or part == "build" for part in file.relative_to(path).parts):
                continue
            source = file.read_text(encoding="utf-8")
            yield from docstrings(file, ast.parse(source))
            yield from trailing_comments(file, source)


def main() -> int:
    """Print the shares; return 1 where one is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--list", action="store_true", help="show the lines that are counted")
    args = parser.parse_args()
    found = list(texts(args.paths))
    if args.list:
        for text in found:
            if text.is_headless:
                print(f"{text.path}:{text.line}: {text.text}")
    status = 0
    for kind in ("docstrings", "arguments", "comments"):
        of_kind = [text for text in found if text.kind == kind]
        count = sum(text.is_headless for text in of_kind)
        share = count / max(len(of_kind), 1)
        status |= share > MAX_SHARE
        print(f"{kind}: {count} of {len(of_kind)} headless, {share:.1%}")
    return status


if __name__ == "__main__":
    sys.exit(main())

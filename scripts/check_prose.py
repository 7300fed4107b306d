"""Check the wording in docstrings, comments and Markdown.

    python scripts/check_prose.py                # the whole tree; exit status 1 if a limit is exceeded
    python scripts/check_prose.py PATH ...       # these files and folders, with one line per file
    python scripts/check_prose.py --list PATH    # with each phrase that is counted

Docstrings, argument lines and trailing comments must not begin with a preposition, a relative pronoun or a
conjunction ("Of a tile", "What is read"): at most 4 percent of each kind. Each file may have 45 "of" per 1,000 words,
one of the turns in `prose_words.py` per 100 words, and none of its words; files below 150 words are counted together
with the short files in their folder.
"""

import argparse
import ast
import bisect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import prose_words

_RELATIVES = "of that what whether which who whom whose those where when how why as than then"
_PREPOSITIONS = "for from in into on to with without by at within before after behind beyond between among like"
_CONJUNCTIONS = "if while until since likewise"
HEADLESS = frozenset(f"{_RELATIVES} {_PREPOSITIONS} {_CONJUNCTIONS}".split())
MAX_HEADLESS = 0.04
MAX_OF = 45 / 1000
MAX_TURNS = 1 / 100
MIN_WORDS = 150
ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("jaxserve", "pallas_kernels", "weights", "scripts")
_SECTION = re.compile(r"(?:Args|Attributes):$")
_ENTRY = re.compile(r"    \*{0,2}\w+: (.+)")
_PRAGMA = re.compile(r"(?:type: ignore|noqa|pragma:|fmt:)")
_FENCE = re.compile(r"^ *```.*?^ *```[^\n]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"``.+?``|`[^`]+`|\"[^\"]{1,80}\"|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)


class Opening(NamedTuple):
    """A docstring's first line, an argument line or a trailing comment."""

    kind: str
    path: Path
    line: int
    text: str

    @property
    def is_headless(self) -> bool:
        words = re.findall(r"[A-Za-z]+", self.text[:40])
        return bool(words) and self.text[0].isalpha() and words[0].lower() in HEADLESS


class Phrase(NamedTuple):
    """A phrase that counts against a limit."""

    path: Path
    line: int
    text: str
    instead: str


class Prose(NamedTuple):
    """A file's words, and the phrases among them that have limits."""

    num_words: int
    ofs: list[Phrase]
    turns: list[Phrase]
    forbidden: list[Phrase]

    def __add__(self, other: "Prose") -> "Prose":  # type: ignore[override]
        return Prose(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def excess(self) -> list[str]:
        """Return the limits that the prose exceeds; short texts are judged as if they had `MIN_WORDS` words."""
        words = max(self.num_words, MIN_WORDS)
        found = []
        if len(self.ofs) > words * MAX_OF:
            found.append(f'{len(self.ofs) / words * 1000:.0f} "of" per 1,000 words')
        if len(self.turns) > words * MAX_TURNS:
            found.append(f"{len(self.turns) / words * 100:.1f} turns of phrase per 100 words")
        if self.forbidden:
            found.append(f"{len(self.forbidden)} words outside the vocabulary")
        return found

    @property
    def phrases(self) -> list[Phrase]:
        return sorted(self.ofs + self.turns + self.forbidden)


EMPTY = Prose(0, [], [], [])


def _documented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each docstring with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each comment's line and text, and whether it follows code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and not _PRAGMA.match(text):
            yield token.start[0], text, bool(token.line[: token.start[1]].strip())


def openings(path: Path, source: str) -> Iterator[Opening]:
    """Yield the lines that must begin with their head noun or verb."""
    for first, text in _documented(ast.parse(source)):
        is_section = False
        for offset, line in enumerate(text.splitlines()):
            is_section = bool(_SECTION.match(line)) or (is_section and (not line or line.startswith(" ")))
            if offset == 0:
                yield Opening("docstrings", path, first, line)
            elif is_section and (entry := _ENTRY.match(line)):
                yield Opening("arguments", path, first + offset, entry[1])
    for line, text, is_trailing in _comments(source):
        if is_trailing:
            yield Opening("comments", path, line, text)


def _module_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring and each comment block with its line."""
    yield from _documented(ast.parse(source))
    first, block = 0, [""]
    for line, text, is_trailing in _comments(source):
        if is_trailing or line != first + len(block):
            yield first, "\n".join(block)
            first, block = line, []
        block.append(text)
    yield first, "\n".join(block)


def _blank(match: re.Match[str]) -> str:
    """Return as many line ends as the match has, so that later lines keep their numbers."""
    return " code " + "\n" * match[0].count("\n")


def read_prose(path: Path, source: str) -> Prose:
    """Return the prose in a Python or Markdown file."""
    texts = [(1, _FENCE.sub(_blank, source))] if path.suffix == ".md" else _module_texts(source)
    total = EMPTY
    for first, text in texts:
        words, starts = [], []
        offset = 0
        for number, line in enumerate(_CODE.sub(_blank, text).split("\n"), first):
            for word in line.split():
                words.append(word)
                starts.append((offset, number))
                offset += len(word) + 1
        plain = " ".join(words)

        def phrases(found: list[tuple[int, str, str]], starts: list[tuple[int, int]] = starts) -> list[Phrase]:
            lines = [starts[bisect.bisect(starts, (start + 1,)) - 1][1] for start, _, _ in found]
            return [Phrase(path, line, text, instead) for line, (_, text, instead) in zip(lines, found, strict=True)]

        ofs = [(match.start(), match[0], "a compound noun") for match in prose_words.OF.finditer(plain)]
        num_words = sum(any(char.isalpha() for char in word) for word in words)
        counted = prose_words.turns(plain), prose_words.forbidden(plain)
        total += Prose(num_words, phrases(ofs), *map(phrases, counted))
    return total


def files(paths: list[Path], suffix: str) -> Iterator[Path]:
    """Yield the files with this suffix among the paths and inside their folders."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob(f"*{suffix}")):
            if file.suffix == suffix and not any(
                part.startswith(".") or part == "build" for part in file.relative_to(path).parts
            ):
                yield file


def pool_short(prose: dict[Path, Prose]) -> dict[Path, Prose]:
    """Add up the short texts in each folder, under the folder's name."""
    pooled: dict[Path, Prose] = {}
    for path, text in prose.items():
        key = path if text.num_words >= MIN_WORDS else path.parent
        pooled[key] = pooled.get(key, EMPTY) + text
    return pooled


def main() -> int:
    """Print the counts; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="show the phrases that are counted")
    args = parser.parse_args()
    status = 0

    found = [
        opening for path in files(args.paths or [ROOT], ".py") for opening in openings(path, path.read_text("utf-8"))
    ]
    for kind in ("docstrings", "arguments", "comments"):
        same_kind = [opening for opening in found if opening.kind == kind]
        headless = [opening for opening in same_kind if opening.is_headless]
        share = len(headless) / max(len(same_kind), 1)
        excess = f", more than {MAX_HEADLESS:.0%}: --list shows them" if share > MAX_HEADLESS else ""
        status |= bool(excess)
        print(f"{kind}: {len(headless)} of {len(same_kind)} headless, {share:.2%}{excess}")
        for opening in headless if args.list else ():
            print(f"{opening.path}:{opening.line}: {opening.text}")

    shipped = [ROOT / name for name in SHIPPED]
    checked = [*files(args.paths or shipped, ".py"), *files(args.paths or [ROOT], ".md")]
    pooled = pool_short({path: read_prose(path, path.read_text("utf-8")) for path in checked})
    failing = 0
    for path, prose in pooled.items():
        for phrase in prose.phrases if args.list else ():
            print(f'{phrase.path}:{phrase.line}: "{phrase.text}": {phrase.instead}')
        excess = prose.excess
        if excess:
            print(f"{path}: {', '.join(excess)}")
            status = 1
        failing += bool(excess)
    print(f"files: {failing} of {len(pooled)} above a limit")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""The checker of prose: what it counts, what it leaves out, and where it finds a phrase."""

from pathlib import Path

import pytest

import check_prose
import prose_words

MODULE = '''"""Sizes of the pages of a pool.

It has what `that of` tokens need, where there are any.
"""

# A comment in two lines, behind
# the code.
x = 1  # that of a row
text = "of of of those of"
'''
MARKDOWN = """# A title of one page

```bash
echo of, those of
```

Text with `code of a line`, "a quoted word of it" and a [link](of.md)
behind it.
"""


def phrases(found: list[check_prose.Phrase]) -> list[tuple[int, str]]:
    return [(phrase.line, phrase.text) for phrase in found]


def test_docstrings_and_comments_are_counted_at_their_lines() -> None:
    prose = check_prose.read_prose(Path("module.py"), MODULE)
    assert phrases(prose.ofs) == [(1, "of"), (1, "of"), (8, "of")]
    assert phrases(prose.turns) == [(3, "what"), (3, "where"), (8, "that of")]
    assert phrases(prose.forbidden) == [(6, "behind")]


def test_code_and_quotations_in_markdown_are_not_counted() -> None:
    prose = check_prose.read_prose(Path("page.md"), MARKDOWN)
    assert phrases(prose.ofs) == [(1, "of")]
    assert phrases(prose.forbidden) == [(8, "behind")]


@pytest.mark.parametrize(
    "text",
    [
        "the dot product of two rows",
        "in the directory where weights are",
        "behind a reverse proxy",
        "a mixture of experts",
        "What is a page? A block",
        "decides what",
        "it goes on the device",
        "the decode batch",
        "runs alone.",
        "in fact",
    ],
)
def test_right_uses_are_not_counted(text: str) -> None:
    assert prose_words.forbidden(text) == []
    assert len(prose_words.turns(text)) == ("what" in text.split())


@pytest.mark.parametrize(
    "text",
    [
        "the product with a matrix",
        "multiplies x by the weights",
        "rows in decode",
        "the norm behind the layer",
        "there is room for it",
        "for tokens alone.",
        "layers with a state",
        "experts of every token",
        "the marks",
        "static facts",
        "it goes on",
        "a kept program",
    ],
)
def test_words_outside_the_vocabulary_are_counted(text: str) -> None:
    assert len(prose_words.forbidden(text)) == 1


def test_limits_hold_per_file_and_for_short_files_together() -> None:
    long = check_prose.read_prose(Path("long.md"), "word of " * 4 + "word " * 196)
    short = check_prose.read_prose(Path("short.md"), "word of " * 4 + "word " * 20)
    pooled = check_prose.pool_short({Path("a/long.md"): long, Path("a/b.md"): short, Path("a/c.md"): short})
    assert pooled == {Path("a/long.md"): long, Path("a"): short + short}
    assert (long.excess, short.excess, (short + short).excess) == ([], [], ['53 "of" per 1,000 words'])

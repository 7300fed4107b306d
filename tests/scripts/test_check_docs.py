"""The checker of the documentation, and the documentation checked by it as far as a second allows."""

from pathlib import Path

import pytest

import check_docs

MAX_README_WORDS = 900

TEXT = """# A title: with `code`, and [a link](x.md)

```bash
echo "[not](a-link.md)"
```

<!-- not run: needs a GPU -->
```python
import pallas
```

## Twice
## Twice

```python
x = 1
```

```
output
```

```python
assert x == 1
```
"""


def test_blocks_have_lines_languages_and_reasons() -> None:
    blocks = check_docs.read_blocks(TEXT)
    found = [(block.line, block.language, block.reason) for block in blocks]
    expected = [(4, "bash", None), (9, "python", "needs a GPU"), (16, "python", None), (20, "", None)]
    assert found == [*expected, (24, "python", None)]
    assert blocks[0].code == 'echo "[not](a-link.md)"\n'
    with pytest.raises(ValueError, match="the block at line 2 must end"):
        check_docs.read_blocks("\n```bash\n")


def test_python_blocks_are_one_script_with_the_lines_of_the_text() -> None:
    blocks = check_docs.read_blocks(TEXT)
    script = check_docs.one_script([blocks[2], blocks[4]])
    assert script.splitlines()[15] == "x = 1"
    assert script.splitlines()[23] == "assert x == 1"
    exec(script, {})


def test_headings_have_the_anchors_of_github() -> None:
    assert check_docs.anchors(TEXT) == {"a-title-with-code-and-a-link", "twice", "twice-1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x](other.md) [y](other.md#here) [z](#top) `sub/code.py` `sub/`\n# Top", None),
        ("[x](https://example.org/) `path/to/checkpoint/` `/etc/x.py` `a / b` `[x](gone.md)`", None),
        ("[x](gone.md)", "there is no gone.md"),
        ("[x](other.md#there)", "other.md has no heading #there"),
        ("[x](#top)", "has no heading #top"),
        ("![x](gone.png)", "there is no gone.png"),
        ('<img src="gone.svg">', "there is no gone.svg"),
        ('<source srcset="gone.svg">', "there is no gone.svg"),
        ("`sub/gone.py`", "there is no sub/gone.py"),
        ("`gone/`", "there is no gone/"),
        ("`kernel.py` `Module.py` `a.b`", "there is no Module.py in any folder"),
    ],
)
def test_links_and_paths_that_lead_nowhere_are_found(text: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Here")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "code.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "kernel.py").touch()
    (tmp_path / "text.md").write_text(text)
    found = list(check_docs.broken_links(tmp_path / "text.md", tmp_path))
    assert [message in shown for shown in found if message] == ([True] if message else []), found


def test_commands_that_fail_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    text = "```bash\nexit 3\n```\n```bash\ncat made\n```\n```python\nopen('made')\n```\n"
    (tmp_path / "text.md").write_text("```bash\ntouch made\n```\n" + text)
    (first,) = check_docs.run_file(tmp_path / "text.md", tmp_path)
    assert first == "text.md:5: exit code 3\n"


@pytest.mark.parametrize("path", check_docs.markdown_files(), ids=lambda path: str(path.relative_to(check_docs.ROOT)))
def test_every_link_and_path_of_the_documentation_leads_somewhere(path: Path) -> None:
    assert list(check_docs.broken_links(path)) == []


def test_the_readme_is_short() -> None:
    assert len((check_docs.ROOT / "README.md").read_text().split()) <= MAX_README_WORDS

"""Files that appear complete, whatever happens to their writers and readers."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.system.whole_file import STALE_S, check_writable, write_whole


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([i]) * 100_000 for i in range(60)]
    write_whole(path, contents[0])
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [write_whole(path, content) for content in contents])
        while not writing.done():
            assert path.read_bytes() in contents
    assert path.read_bytes() == contents[-1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_breaks_off_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_left_by_a_kill_vanish_and_files_being_written_stay(tmp_path: Path) -> None:
    for name, age_s in (("stale", 2 * STALE_S), ("fresh", 0.0)):
        left = tmp_path / f".jaxserve-{name}"
        left.mkdir()
        (left / "file").touch()
        os.utime(left, (time.time() - age_s,) * 2)
    write_whole(tmp_path / "file", b"")
    assert {path.name for path in tmp_path.iterdir()} == {".jaxserve-fresh", "file"}


def test_the_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "file", b"")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("name", ["no/such/directory", "x" * 300])
def test_a_check_fails_if_a_write_would(tmp_path: Path, name: str) -> None:
    for attempt in (check_writable, lambda path: write_whole(path, b"")):
        with pytest.raises(OSError, match=r"No such file|name too long"):
            attempt(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    for name in ("old", "new"):
        check_writable(tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old", b"old")]

"""Pages in a file: whatever happens to it, a page is returned as it was written or not at all."""

import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling.kv_cache import page_archive
from jaxserve.scheduling.kv_cache.page_archive import PageArchive, PageKey, SlicedArchive
from jaxserve.scheduling.kv_cache.pages import STATES
from tests.random_runs import examples

PAGE_BYTES = 200
SLOT_BYTES = 64 + PAGE_BYTES
WEIGHTS, OTHER_WEIGHTS = b"a" * 16, b"b" * 16


def open_archive(path, num_pages=8, fingerprint=WEIGHTS):
    return PageArchive(path, fingerprint, PAGE_BYTES, num_pages * SLOT_BYTES)


def key(number):
    return PageKey(number % 3, bytes([number % 256, number // 256]) * 8)


def page(number):
    return random.Random(number).randbytes(PAGE_BYTES)


@given(st.lists(st.tuples(st.sampled_from("wwwrrdo"), st.integers(0, 11)), max_size=60))
@settings(max_examples=examples(40))
def test_archive_behaves_like_a_bounded_dictionary(tmp_path_factory, operations):
    path, expected = tmp_path_factory.mktemp("pages"), {}
    archive = open_archive(path)
    for name, number in operations:
        if name == "w":
            assert archive.write(key(number), page(number))
            if key(number) not in expected and len(expected) == 8:
                del expected[next(iter(expected))]
            expected[key(number)] = page(number)
        elif name == "r":
            assert archive.read(key(number)) == expected.get(key(number))
        elif name == "d":
            archive.delete(key(number))
            expected.pop(key(number), None)
        else:
            deleted = [each for each in map(key, range(12)) if each not in expected]
            archive.close()
            archive = open_archive(path)
            assert set(archive.keys) >= set(expected)
            for each in deleted:  # a deleted page may be found again, as it is still right
                archive.delete(each)
        assert archive.keys == list(expected)
    assert os.path.getsize(path / "pages-0.kv") <= 8 * SLOT_BYTES
    archive.close()


def test_an_archive_of_a_petabyte_opens_and_empties_immediately(tmp_path):
    """It keeps no list of slots that never had a page."""
    archive = open_archive(tmp_path, num_pages=1 << 42)
    assert archive.write(key(1), page(1))
    archive.clear()
    assert archive.write(key(2), page(2))
    assert os.path.getsize(tmp_path / "pages-0.kv") == SLOT_BYTES
    archive.close()


def test_no_flipped_bit_is_returned(tmp_path):
    archive = open_archive(tmp_path)
    for number in range(8):
        archive.write(key(number), page(number))
    file, rng = tmp_path / "pages-0.kv", random.Random(1)
    whole, num_lost = file.read_bytes(), 0
    for _ in range(1000):
        offset = rng.randrange(len(whole))
        os.pwrite(archive._file, bytes([whole[offset] ^ 1 << rng.randrange(8)]), offset)
        hit = offset // SLOT_BYTES
        for number in (hit, (hit + 1) % 8):
            found = archive.read(key(number))
            assert found == (None if number == hit else page(number))
        num_lost += 1
        os.pwrite(archive._file, whole[offset : offset + 1], offset)
        archive.write(key(hit), page(hit))
        whole = file.read_bytes()
    assert archive.num_corrupt == num_lost
    archive.close()


def test_flipped_headers_are_unknown_after_opening(tmp_path):
    archive = open_archive(tmp_path)
    for number in range(8):
        archive.write(key(number), page(number))
    archive.close()
    file, rng = tmp_path / "pages-0.kv", random.Random(2)
    whole = file.read_bytes()
    for _ in range(100):
        slot, offset = rng.randrange(8), rng.randrange(64)
        content = bytearray(whole)
        content[slot * SLOT_BYTES + offset] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        archive = open_archive(tmp_path)
        assert len(archive.keys) == 7
        assert all(archive.read(each) in {page(number) for number in range(8)} for each in archive.keys)
        archive.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, SLOT_BYTES - 1, 3 * SLOT_BYTES + 80])
def test_truncated_file_returns_whole_pages_only(tmp_path, num_bytes):
    archive = open_archive(tmp_path)
    for number in range(8):
        archive.write(key(number), page(number))
    archive.close()
    os.truncate(tmp_path / "pages-0.kv", num_bytes)
    archive = open_archive(tmp_path)
    found = [archive.read(key(number)) for number in range(8)]
    first = num_bytes // SLOT_BYTES
    assert found == [page(number) if number < first else None for number in range(8)]
    assert all(archive.write(key(number), page(number)) for number in range(8))
    assert [archive.read(key(number)) for number in range(8)] == [page(number) for number in range(8)]
    archive.close()


def test_other_weights_and_smaller_files(tmp_path):
    archive = open_archive(tmp_path)
    for number in range(8):
        archive.write(key(number), page(number))
    archive.close()
    other = open_archive(tmp_path, fingerprint=OTHER_WEIGHTS)
    assert other.keys == []
    assert other.read(key(1)) is None
    other.write(key(9), page(9))
    other.close()
    archive = open_archive(tmp_path, num_pages=4)
    assert set(archive.keys) < {key(number) for number in range(8)}
    assert os.path.getsize(tmp_path / "pages-0.kv") == 4 * SLOT_BYTES
    archive.close()


def test_two_engines_have_a_file_each(tmp_path):
    first, second = open_archive(tmp_path), open_archive(tmp_path)
    first.write(key(1), page(1))
    assert second.read(key(1)) is None
    assert {file.name for file in tmp_path.iterdir()} == {"pages-0.kv", "pages-1.kv"}
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    first.close()
    third = open_archive(tmp_path)
    assert third.read(key(1)) == page(1)
    third.close()
    second.close()


def test_abandoned_and_forked_files_are_unlocked(tmp_path):
    archive = open_archive(tmp_path)
    archive.write(key(1), page(1))
    del archive
    gc.collect()
    archive = open_archive(tmp_path)
    assert archive.read(key(1)) == page(1)
    copy = os.dup(archive._file)  # a forked process has such a file and shares the lock
    archive.close()
    archive = open_archive(tmp_path)
    assert archive.read(key(1)) == page(1)
    archive.close()
    os.close(copy)


def test_file_that_cannot_be_locked_or_read_is_closed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    num_open = len(os.listdir("/dev/fd"))
    for module, name in ((fcntl, "flock"), (page_archive.os, "fstat")):
        monkeypatch.setattr(module, name, fail)
        with pytest.raises(OSError, match="Input/output error"):
            open_archive(tmp_path)
        monkeypatch.undo()
    gc.collect()
    assert len(os.listdir("/dev/fd")) == num_open


def test_failing_disk_loses_pages_only(tmp_path, monkeypatch, caplog):
    archive = open_archive(tmp_path)
    assert archive.write(key(1), page(1))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_archive.os, "pwritev", fail)
    assert not archive.write(key(2), page(2))
    monkeypatch.undo()
    monkeypatch.setattr(page_archive.os, "pread", fail)
    assert archive.read(key(1)) is None
    monkeypatch.undo()
    monkeypatch.setattr(page_archive.os, "pwritev", lambda *_: SLOT_BYTES // 2)  # the disk is full
    assert not archive.write(key(3), page(3))
    monkeypatch.undo()
    monkeypatch.setattr(page_archive.os, "fsync", fail)
    assert not archive.sync()
    monkeypatch.undo()
    assert not archive.sync(), "the system reports a lost page once"
    assert archive.num_errors == 3
    archive.clear()
    assert archive.sync()
    assert archive.write(key(2), page(2))
    assert archive.read(key(2)) == page(2)
    archive.close()


WRITER = """
import sys
from pathlib import Path
from tests.kv_cache.test_page_archive import key, open_archive, page
archive = open_archive(Path(sys.argv[1]), num_pages=50)
number = 0
print("ready", flush=True)
while True:
    archive.write(key(number), page(number))
    if number % 7 == 6:
        archive.delete(key(number - 3))
    number = (number + 1) % 400
"""


def test_killed_writer_leaves_whole_pages(tmp_path):
    """SIGKILL at ten random moments, while pages overwrite others."""
    root, rng = Path(__file__).parents[2], random.Random(3)
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0.001, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        archive = open_archive(tmp_path, num_pages=50)
        by_key = {key(number): page(number) for number in range(400)}
        found = {each: archive.read(each) for each in archive.keys}
        assert all(content in (None, by_key[each]) for each, content in found.items())
        assert sum(content is not None for content in found.values()) >= len(found) - 1 > 0
        archive.close()


def test_a_state_takes_several_slots_and_is_read_whole_or_not_at_all(tmp_path):
    state, name = random.Random(0).randbytes(2 * PAGE_BYTES + 50), PageKey(STATES, bytes(16))
    archive = SlicedArchive(open_archive(tmp_path), len(state))
    assert archive.num_slices == 3
    assert archive.write(key(1), page(1))
    assert archive.write(name, state)
    archive.archive.close()
    for others, expected in (([name], state), ([key(2)], None)):
        archive = SlicedArchive(open_archive(tmp_path), len(state))
        assert set(archive.keys) == {key(1), *others}
        assert (archive.read(key(1)), archive.read(name)) == (page(1), expected)
        archive.archive.delete(PageKey(STATES - 1, bytes(16)))
        archive.archive.write(key(2), page(2))  # overwrites a slice's slot
        archive.archive.close()
    archive = SlicedArchive(open_archive(tmp_path), len(state))
    assert set(archive.archive.keys) == {key(1), key(2)}, "slices are left"
    other = random.Random(1).randbytes(len(state))
    assert archive.write(name, other)
    assert archive.read(name) == other

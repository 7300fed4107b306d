"""Latest turns of conversations: only so many, changed by several threads."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from simulation import make_request

from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.core import sessions as module
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.core.sessions import Session, SessionQuota, SessionQuotaError, Sessions, UnknownSessionError
from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence


def test_the_oldest_turns_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MAX_TURNS", 4)
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    sessions = Sessions(tmp_path)
    for num_tokens, kept in ((10, [6, 7, 8, 9]), (40, [8, 9])):
        for index in range(10):
            sessions.remember(Session(f"{index}", [1] * num_tokens, ""))
        found = []
        for index in range(10):
            try:
                found.append(int(sessions.latest(f"{index}").name))
            except UnknownSessionError:
                continue
        assert found == kept
    assert [sessions.forget("9"), sessions.forget("9"), sessions.forget("8")] == [40, 0, 40]
    sessions.remember(Session("long", [1] * 100, ""))
    assert sessions.latest("long").token_ids == [1] * 100, "forgotten turns count no more"


def test_threads_remember_and_forget_the_same_turn(tmp_path: Path) -> None:
    sessions, session = Sessions(tmp_path), Session("a", [1, 2, 3], "")

    def run(index: int) -> None:
        for _ in range(300):
            sessions.remember(session)
            assert sessions.forget("a") in (0, 3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert sessions.forget("a") == 0


def test_other_files_are_no_sessions(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    path = sessions._path("a", "")
    for content in ("3", "[]", '"a"', "{}", "{", "null"):
        path.write_text(content)
        assert sessions.list() == []


def test_files_of_other_versions_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They can be deleted and replaced."""
    sessions, session = Sessions(tmp_path, SessionQuota(max_sessions=1, max_bytes=10_000)), Session("a", [1], "")
    path = sessions._path("a", "")
    for content, words in (
        ({"version": 1, "name": "a", "token_ids": [1], "salt": ""}, "has format 1, and this version .* reads format 2"),
        ({"version": 3}, "has format 3, and this version of jaxserve reads format 2; send its conversation again"),
        ({"version": 2}, "is damaged; send its conversation again with the same name, and save it again"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(UnknownSessionError, match=words):
            sessions.read("a")
    for _ in range(2):
        assert sessions.list() == []
    assert caplog.text.count("a saved session is not listed") == 1
    sessions.write(session, "a")
    assert [each.name for each in sessions.list()] == ["a"]
    path.write_text('{"version": 1}')
    with pytest.raises(SessionQuotaError):
        sessions.write(session, "b")
    sessions.delete("a")
    with pytest.raises(UnknownSessionError, match="no saved session 'a'; save it first"):
        sessions.delete("a")
    sessions.write(session, "b")


def test_a_file_with_a_flipped_bit_is_no_session(tmp_path: Path) -> None:
    """Most would be another valid token."""
    sessions, session = Sessions(tmp_path), Session("a", [*range(100, 120)], "salt")
    saved = sessions.write(session, "a")
    assert sessions.read("a") == saved
    path = sessions._path("a", "")
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with pytest.raises(UnknownSessionError):
            sessions.read("a")
        assert sessions.list() == []


def test_each_owner_saves_up_to_the_quota(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, SessionQuota(max_sessions=2, max_bytes=1000))
    session = Session("a", [1] * 50, "")
    sessions._path("deleted", "").with_suffix(".npz").symlink_to("nowhere")  # deleted before its size is read
    for name in ("a", "b", "a"):  # again: it replaces the first
        sessions.write(session, name)
    with pytest.raises(SessionQuotaError, match="max_saved_sessions=2 conversations are saved already; delete one"):
        sessions.write(session, "c")
    with pytest.raises(SessionQuotaError, match="max_saved_sessions=2 conversations are saved already"):
        sessions.check_quota("c")
    sessions.check_quota("a")
    sessions.write(replace(session, tenant="other"), "c")
    sessions.delete("b")
    sessions.write(session, "c")
    sessions.delete("a")
    with pytest.raises(SessionQuotaError, match=r"at most 1,000 bytes \(saved_sessions_size\), .* make it 1,\d+;"):
        sessions.write(replace(session, token_ids=[1] * 280), "a")
    assert [each.name for each in sessions.list()] == ["c"]


def test_sessions_name_the_adapter_of_their_latest_turn(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    for adapter, start in (("", 0), ("digest", 1)):
        request = make_request("a#0", [1, 2], reuse=ReuseHint("mine"), adapter=adapter, adapter_start=start)
        sessions.note(RequestGroup("a", None, [request], None, time.monotonic))
        session = sessions.latest("mine")
        assert session.pages == CachedSequence([1, 2], b"", (), adapter, start)
        sessions.write(session, "mine")
        assert sessions.read("mine").pages == session.pages

"""Saved sessions and tiers under odd conditions: other sizes and models, two engines, full disks, one page."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core import sessions as module
from jaxserve.core.sessions import Session
from jaxserve.errors import RequestError
from jaxserve.execution.page_mover import PageMover
from jaxserve.offline.llm import LLM
from tests.e2e.conversations import conversations
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens
from tests.soon_compiled import few_programs

pytestmark = [pytest.mark.usefixtures("any_load_pays"), pytest.mark.long]

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PAGE_SIZE = SIZES["page_size"]


@pytest.fixture
def start_llm(llama: Path, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:

        def start_llm(**options: Any) -> LLM:
            own = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path)}
            with few_programs():
                return stack.enter_context(LLM(str(llama), **{**SIZES, **own, **options}))

        yield start_llm


def answer(llm: LLM, prompt: list[int], session: str = "mine") -> list[int]:
    given = {"prompt_token_ids": prompt, "reuse": ReuseHint(session)}
    (output,) = llm.generate([given], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_sessions_in_smaller_engines_and_of_other_models(start_llm: Callable[..., LLM]) -> None:
    """What does not fit, or has no meaning here, is refused with the reason, and the engine serves on."""
    llm = start_llm()
    history = [*tokens(41, "long")]
    history += answer(llm, history)
    llm.sessions.save("mine")
    llm.close()
    llm = start_llm(max_model_len=32)
    session, cached, num_computed = llm.sessions.restore("mine")
    assert session.token_ids == history
    assert (cached.disk, num_computed) == (28, 3), "all that has a next token here"
    with pytest.raises(RequestError, match="max_model_len"):
        answer(llm, [*history, 5])
    assert len(answer(llm, history[:20])) == 4
    llm.close()
    llm = start_llm(num_pages=8)
    with pytest.raises(RequestError, match=r"must fit the page pool: 45 prompt tokens .* but there are 8"):
        llm.sessions.restore("mine")
    assert len(answer(llm, history[:20])) == 4
    llm.close()
    llm = start_llm()
    llm.engine.sessions.write(Session("alien", [3, 10**6], ""), "alien")
    with pytest.raises(RequestError, match="1000000"):
        llm.sessions.restore("alien")
    assert llm.sessions.restore("mine").session.token_ids == history


def test_two_engines_on_one_directory(start_llm: Callable[..., LLM]) -> None:
    """Each writes its own file of pages, and lists the saved sessions of both."""
    first, second = start_llm(), start_llm()
    prompt = tokens(21, "shared")
    history = prompt + answer(first, prompt)
    first.sessions.save("mine")
    restored = second.sessions.restore("mine")
    assert (restored.session.token_ids, restored.cached_tokens.total) == (history, 0), "pages are the first engine's"
    assert answer(second, prompt) == history[len(prompt) :]
    later = [*history, *tokens(5, "question")]
    later += answer(second, later)
    second.sessions.save("mine")
    restored = first.sessions.restore("mine")
    assert restored.session.token_ids == later
    assert restored.cached_tokens.total == len(history) // PAGE_SIZE * PAGE_SIZE
    first.sessions.delete("mine")
    assert second.sessions.list() == []


def test_a_full_disk_refuses_a_session_and_keeps_the_former(
    start_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    llm = start_llm()
    history = tokens(9, "first")
    history += answer(llm, history)
    saved = llm.sessions.save("mine")
    longer = [*history, 7]
    longer += answer(llm, longer)
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_whole", fail)
        with pytest.raises(RequestError, match="the session 'mine' cannot be saved: No space left on device"):
            llm.sessions.save("mine")
    assert llm.sessions.list() == [saved.session]
    assert llm.sessions.restore("mine").session.token_ids == history
    assert answer(llm, longer)
    archive, fsync = llm.engine.host.core.replicas[0].mover.media[0]._archive, os.fsync
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: fail() if file == archive._file else fsync(file))
        assert llm.sessions.save("mine").num_stored_tokens == 0, "no page is known to outlive the machine"
    assert llm.sessions.save("mine").num_stored_tokens == 0, "pages before the failure may be lost"
    (tmp_path / "sessions").rename(tmp_path / "others")
    (tmp_path / "sessions").write_text("no directory")
    with pytest.raises(RequestError, match="the session 'mine' cannot be saved: "):
        llm.sessions.save("mine")
    assert llm.sessions.list() == []


@pytest.mark.parametrize(("num_host", "num_disk"), [(1, 0), (0, 1), (1, 1), (2, 40)])
def test_tiers_of_few_pages(
    start: Callable[..., DrivenEngine], llama: Path, tmp_path: Path, num_host: int, num_disk: int
) -> None:
    expected, *_ = conversations(start(), 4, 3)
    page_gib = 2 * 4 * 4 * 16 * 4 / 2**30  # keys and values of 4 tokens, in 4 heads of 16 float32 elements
    options: dict[str, Any] = {"kv_offloading_size": (num_host + 0.5) * page_gib if num_host else None}
    if num_disk:
        slot_gib = page_gib + 64 / 2**30  # with its header
        options |= {"kv_offloading_path": str(tmp_path), "kv_offloading_disk_size": (num_disk + 0.5) * slot_gib}
    with few_programs():
        engine = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **SIZES, **options))
    with closing(engine):
        assert conversations(engine, 4, 3)[0] == expected
        mover = engine.replicas[0].mover
        assert isinstance(mover, PageMover)
        capacities = [tier.num_pages for tier in mover.new_tiers()]
        assert capacities == [each for each in (num_host, num_disk) if each]
        engine.check_integrity()

"""Many chats over a small pool: what a tier saves, what it moves, and what must not be found in it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import transformers

from jaxserve import LLM, LoRARequest
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.page_tiers import new_page_bytes
from jaxserve.execution.moved_pools import MovedPools
from jaxserve.scheduling.kv_cache import page_archive, prefix_hashes
from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes
from tests.adapters import write_adapters
from tests.e2e.conversations import SHORT, conversations
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens
from tests.soon_compiled import few_programs

pytestmark = [pytest.mark.usefixtures("any_load_pays"), pytest.mark.long]

Start = Callable[..., DrivenEngine]
NUM_CHATS, NUM_TURNS = 16, 5
FINAL_LEN = 20 + NUM_TURNS * 7  # a chat's prompts and answers
NUM_PAGES = NUM_CHATS * FINAL_LEN // SIZES["page_size"] // 4  # a quarter of what all chats need


def tier(name: str, path: Path) -> dict[str, Any]:
    return {"kv_offloading_size": 2.0**-8} if name == "host" else {"kv_offloading_path": str(path)}


@pytest.mark.parametrize("name", ["host", "disk"])
def test_chats_over_a_quarter_of_their_pages_are_computed_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected, *_ = conversations(start(num_pages=1000), NUM_CHATS, NUM_TURNS)
    engine, scatter = start(num_pages=NUM_PAGES, **tier(name, tmp_path)), MovedPools.scatter
    num_loaded, num_bytes = 0, 0

    def counted(self: MovedPools, state: Any, pages: Any, contents: Any, size: int) -> Any:
        nonlocal num_loaded, num_bytes
        num_loaded += len(pages)
        num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(contents))
        return scatter(self, state, pages, contents, size)

    monkeypatch.setattr(MovedPools, "scatter", counted)
    before = engine.stats.num_loaded_pages
    answers, num_computed, num_new = conversations(engine, NUM_CHATS, NUM_TURNS)
    assert answers == expected
    num_prompt = sum(NUM_CHATS * (25 + 7 * turn) for turn in range(NUM_TURNS))
    assert num_computed - num_new <= 0.1 * num_prompt, "prompt tokens are computed again"
    assert engine.stats.num_loaded_pages - before == num_loaded
    assert num_loaded * SIZES["page_size"] > 0.3 * num_prompt, "the pool holds the chats"
    assert num_bytes == num_loaded * new_page_bytes([engine.replicas[0].executor.programs.lowering]).size
    assert engine.stats.num_compiles == 0
    engine.check_integrity()


def test_a_slow_disk_delays_no_request(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that wait for it are served from memory, and those that it has not taken are computed."""
    expected, *_ = conversations(start(), 6, 3)
    with few_programs():
        config = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path), **SIZES}
        engine = DrivenEngine(EngineConfig(start().config.model, **config))
    pwritev = os.pwritev

    def wait(*args: Any) -> Any:
        time.sleep(0.1)
        return pwritev(*args)

    with monkeypatch.context() as patched:
        patched.setattr(page_archive.os, "pwritev", wait)
        answers, *_ = conversations(engine, 6, 3)
        num_waiting = len(engine.replicas[0].mover.media[0]._unwritten)
    assert answers == expected
    assert num_waiting > 0, "the disk is as fast as the chats"
    engine.close()


@pytest.mark.parametrize("removed", [None, "salt", "adapter"])
def test_salts_and_adapters_never_cross(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str | None
) -> None:
    """Not in another engine either, whose adapter has the same name. The test fails without its part in the hashes."""
    pytest.importorskip("peft")
    if removed == "salt":
        monkeypatch.setattr(prefix_hashes, "_salt_hash", lambda salt: bytes(16))
    elif removed == "adapter":
        monkeypatch.setattr(PrefixHashes, "_with_adapter", lambda self, previous, *_: previous)
    prompt, cached = tokens(33, "crossing"), []
    for turn in range(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="float32", attn_implementation="eager")
        directory = tmp_path / f"adapters {turn}"
        write_adapters(model, directory, {"same": {"r": 4 + turn}})
        options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path / "pages"), **SIZES}
        with few_programs():
            engine = DrivenEngine(EngineConfig(str(llama), enable_lora=True, max_loras=1, max_lora_rank=8, **options))
        llm = LLM.over(engine)
        for salt, adapter in (("a", False), ("b", False), (None, False), (None, True)):
            given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            request = LoRARequest("same", 1, str(directory / "same")) if adapter else None
            (output,) = llm.generate([given], SHORT, use_tqdm=False, lora_request=request)
            cached.append(output.num_cached_tokens)
        engine.close()
    crossed = cached != [0, 0, 0, 0, 32, 32, 32, 0]
    assert crossed == (removed is not None), cached

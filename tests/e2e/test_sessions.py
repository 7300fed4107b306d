"""Conversations that outlive their engine: the same next tokens, and only what is missing is computed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.lora_request import LoRARequest
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.sessions import MAX_NAME_LEN, NoSessionsError, UnknownSessionError
from jaxserve.errors import RequestError
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import tokens

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = tokens(33, "a conversation")
PAGE_SIZE = SIZES["page_size"]
PROGRAM = """
import sys, time
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.offline.llm import LLM
from tests.e2e.sizes import SIZES
model, path, prompt = sys.argv[1], sys.argv[2], eval(sys.argv[3])
llm = LLM(model, skip_tokenizer_init=True, kv_offloading_path=path, **SIZES)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": prompt, "reuse": ReuseHint("mine")}], greedy, use_tqdm=False)
saved = llm.sessions.save("mine")
print(output.outputs[0].token_ids, saved.num_stored_tokens, flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(llama: Path, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:

        def start(**options: Any) -> LLM:
            own = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path)}
            return stack.enter_context(LLM(str(llama), **{**SIZES, **own, **options}))

        yield start


def first_queries(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return an adapter of the first layer's queries."""
    arch, rng = llm.engine.arch, np.random.default_rng(seed)
    shapes = {"A": (4, arch.hidden_size), "B": (arch.attention.num_heads * arch.attention.head_dim, 4)}
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    return {f"{prefix}{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(llm: LLM, prompt: list[int], session: str = "", **fields: Any) -> Any:
    hint = ReuseHint(session) if session else None
    (output,) = llm.generate([{"prompt_token_ids": prompt, "reuse": hint, **fields}], GREEDY, use_tqdm=False)
    return output


def test_a_conversation_survives_a_kill(llama: Path, tmp_path: Path, start: Callable[..., LLM]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(llama), str(tmp_path), str(PROMPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    answer, num_stored = eval(line.replace("] ", "], "))
    num_full = (len(PROMPT) + len(answer) - 1) // PAGE_SIZE * PAGE_SIZE  # the last token has no key
    assert num_stored == num_full
    llm = start()
    session, cached, num_computed = llm.sessions.restore("mine")
    assert session.token_ids == PROMPT + answer
    assert cached == CachedTokens(disk=num_full)
    assert num_computed == len(session.token_ids) - num_full
    later = [*session.token_ids, *tokens(5, "a question")]
    continued = run(llm, later, "mine")
    assert continued.cached_tokens == CachedTokens(device=len(session.token_ids) // PAGE_SIZE * PAGE_SIZE)
    with LLM(str(llama), skip_tokenizer_init=True, **SIZES) as plain:
        assert run(plain, later).outputs[0].token_ids == continued.outputs[0].token_ids
        assert run(plain, PROMPT).outputs[0].token_ids == answer


def test_what_is_missing_is_computed(start: Callable[..., LLM], tmp_path: Path) -> None:
    llm = start()
    answer = run(llm, PROMPT, "mine", cache_salt="secret").outputs[0].token_ids
    llm.sessions.save("mine")
    llm.close()
    for path in tmp_path.glob("*/pages-*.kv"):
        path.unlink()
    llm = start()
    session, cached, num_computed = llm.sessions.restore("mine")
    assert (session.token_ids, cached, num_computed) == (PROMPT + answer, CachedTokens(), len(PROMPT + answer))
    assert run(llm, session.token_ids, cache_salt="secret").num_cached_tokens > 0
    assert run(llm, session.token_ids).num_cached_tokens == 0, "the salt is the session's"


def test_sessions_are_listed_and_deleted(start: Callable[..., LLM]) -> None:
    llm = start(engine_process=True)
    assert llm.sessions.list() == []
    for name in ("a", "b"):
        run(llm, tokens(9, name), name)
        llm.sessions.save(name)
    run(llm, tokens(20, "later"), "a")
    assert [session.name for session in llm.sessions.list()] == ["b", "a"]
    saved = llm.sessions.save("a")
    assert [session.name for session in llm.sessions.list()] == ["a", "b"]
    assert saved.session.token_ids[:20] == tokens(20, "later")
    assert saved.num_stored_tokens == 27 // PAGE_SIZE * PAGE_SIZE
    assert llm.sessions.restore("a").session == saved.session
    llm.sessions.delete("a")
    for call in (llm.sessions.delete, llm.sessions.restore):
        with pytest.raises(UnknownSessionError, match="no saved session 'a'"):
            call("a")
    with pytest.raises(UnknownSessionError, match="session_id"):
        llm.sessions.save("never named")
    with pytest.raises(RequestError, match=f"1 to {MAX_NAME_LEN} characters"):
        llm.sessions.restore("x" * 1000)


@pytest.mark.long
def test_sessions_with_an_adapter_need_its_content(start: Callable[..., LLM]) -> None:
    """Its pages return from disk for an adapter with the same content, whatever its name, and for nothing else."""
    lora = {"enable_lora": True, "max_lora_rank": 4}

    def with_adapters(llm: LLM, names: str) -> LLM:
        for name in names:
            llm.update_lora(name, first_queries(llm, seed=ord(name.lower())), {"r": 4, "lora_alpha": 64})
        return llm

    llm, prompt = with_adapters(start(**lora), "ab"), {"prompt_token_ids": PROMPT, "reuse": ReuseHint("mine")}
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=LoRARequest("a"))
    saved = llm.sessions.save("mine")
    num_full = (len(PROMPT) + 7) // PAGE_SIZE * PAGE_SIZE
    assert (saved.session.token_ids, saved.num_stored_tokens) == (PROMPT + first.outputs[0].token_ids, num_full)
    llm.close()
    llm = with_adapters(start(**lora), "b")
    with pytest.raises(RequestError, match=f"the content {saved.session.adapter}.*load it first"):
        llm.sessions.restore("mine")
    with_adapters(llm, "A")
    for name in ("b", None):
        request = None if name is None else LoRARequest(name)
        (other,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)
        assert other.num_cached_tokens == 0
    assert llm.sessions.restore("mine").cached_tokens == CachedTokens(disk=num_full)
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=LoRARequest("A"))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_an_engine_without_pages_on_disk_saves_nothing(start: Callable[..., LLM]) -> None:
    llm = start(kv_offloading_path=None)
    run(llm, PROMPT, "mine")
    for call in (llm.sessions.save, llm.sessions.restore, llm.sessions.delete):
        with pytest.raises(NoSessionsError, match="kv_offloading_path"):
            call("mine")
    with pytest.raises(NoSessionsError):
        llm.sessions.list()

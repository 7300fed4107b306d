"""Pages on disk, in a shared store or in another engine's memory, from engines with other numbers of devices."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.reuse_hint import ReuseHint
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.offline.llm import LLM
from tests.e2e.workloads import assert_same, generate, tokens
from tests.parameters import mainly
from tests.sharded.devices.sizes import SIZES

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

Start = Callable[..., DrivenEngine]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("kv_cache_dtype", mainly(["auto"], "int8", "int4"))
@pytest.mark.parametrize(("option", "tier"), [("kv_offloading_path", "disk"), ("kv_store", "store")])
@pytest.mark.parametrize("order", mainly([(4, 1)], (1, 4, 2, 1)))
def test_pages_are_read_by_engines_with_other_numbers_of_devices(
    start: Start, model: Path, tmp_path: Path, kv_cache_dtype: str, order: tuple[int, ...], option: str, tier: str
) -> None:
    """Four devices hold each of the two KV heads twice."""

    @contextmanager
    def opened(num_devices: int) -> Iterator[DrivenEngine]:
        sizes: dict[str, Any] = SIZES | {"multi_step": 1, option: str(tmp_path)}
        config = EngineConfig(str(model), tensor_parallel_size=num_devices, kv_cache_dtype=kv_cache_dtype, **sizes)
        with closing(DrivenEngine(config)) as engine:
            yield engine

    prompts = [tokens(33, number) for number in range(len(order))]
    expected = generate(start(kv_cache_dtype=kv_cache_dtype), prompts, PARAMS)
    for turn, num_devices in enumerate(order):
        with opened(num_devices) as engine:
            outputs = generate(engine, prompts[: turn + 1], PARAMS)
            for output, wanted in zip(outputs, expected, strict=False):
                assert_same(output, wanted)
            found = [output.cached_tokens for output in outputs]
            assert found == [CachedTokens(**{tier: 32})] * turn + [CachedTokens()]
            mover = engine.replicas[0].mover
            assert mover is not None
            mover.sync()


@pytest.mark.parametrize("degrees", [pytest.param((2, 1), marks=pytest.mark.long), *mainly([], (1, 4))])
def test_pages_move_directly_between_engines_with_other_numbers_of_devices(
    start: Start, model: Path, degrees: tuple[int, int]
) -> None:
    """The consumer computes only last tokens, greedy and seeded ones alike."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sizes: dict[str, Any] = SIZES | {"multi_step": 1, "kv_store": f"tcp://127.0.0.1:{port}"}
    prompts = [tokens(33, number) for number in range(3)]
    with ExitStack() as stack:
        producer, consumer = (
            stack.enter_context(
                closing(DrivenEngine(EngineConfig(str(model), tensor_parallel_size=count, kv_role=role, **sizes)))
            )
            for count, role in zip(degrees, ("kv_producer", "kv_consumer"), strict=True)
        )
        generate(producer, prompts, replace(PARAMS, max_tokens=1))
        assert producer.replicas[0].mover is not None
        producer.replicas[0].mover.sync()
        for params in (PARAMS, replace(PARAMS, temperature=1, seed=5)):
            consumer.reset_prefix_cache()
            outputs = generate(consumer, prompts, params)
            for output, wanted in zip(outputs, generate(start(), prompts, params), strict=True):
                assert_same(output, wanted)
                assert output.cached_tokens == CachedTokens(store=32)


@pytest.mark.parametrize("order", mainly([(1, 2, 4)], (4, 1, 2, 1)))
def test_sessions_are_continued_by_engines_with_other_numbers_of_devices(
    start: Start, model: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Each engine restores what the one before has saved, and adds a turn: the tokens are those of a single engine."""
    history, hint = tokens(20, "conversation"), ReuseHint("mine")
    for turn, num_devices in enumerate(order):
        sizes: dict[str, Any] = SIZES | {"multi_step": 1, "kv_offloading_path": str(tmp_path)}
        with LLM(str(model), tensor_parallel_size=num_devices, **sizes) as llm:
            if turn:
                session, cached, num_computed = llm.sessions.restore("mine")
                num_full = (len(history) - 1) // SIZES["page_size"] * SIZES["page_size"]  # the last token has no key
                assert session.token_ids == history
                assert (cached, num_computed) == (CachedTokens(disk=num_full), len(history) - num_full)
            history = [*history, *tokens(5, turn)]
            prompt = {"prompt_token_ids": history, "reuse": hint}
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            assert output.num_cached_tokens >= (num_full if turn else 0)
            assert_same(output, *generate(start(), [history], PARAMS))
            history = [*history, *output.outputs[0].token_ids]
            llm.sessions.save("mine")

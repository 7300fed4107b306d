"""Pages on disk that an engine with another attention backend has written."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.runner import Runner
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import assert_same, generate, tokens
from tests.parameters import mainly

pytestmark = pytest.mark.usefixtures("any_load_pays")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("kv_cache_dtype", mainly(["auto"], "int8", "int4"))
@pytest.mark.long
def test_pages_are_read_by_another_backend(
    start: Callable[..., DrivenEngine], llama: Path, tmp_path: Path, kv_cache_dtype: str
) -> None:
    @contextmanager
    def opened(backend: str) -> Iterator[DrivenEngine]:
        options = {"attention_backend": backend, "kv_offloading_path": str(tmp_path), "skip_tokenizer_init": True}
        config = EngineConfig(str(llama), kv_cache_dtype=kv_cache_dtype, **SIZES, **options)
        with closing(DrivenEngine(config)) as engine:
            runner = engine.replicas[0].executor
            assert isinstance(runner, Runner)
            assert runner.programs.lowering.backend == backend
            yield engine

    prompts = [tokens(33, number) for number in range(3)]
    expected = generate(start(kv_cache_dtype=kv_cache_dtype), prompts, GREEDY)
    for turn, backend in enumerate(("native", "xla", "native")):
        with opened(backend) as engine:
            outputs = generate(engine, prompts[: turn + 1], GREEDY)
            for output, wanted in zip(outputs, expected, strict=False):
                assert_same(output, wanted)
            found = [output.cached_tokens for output in outputs]
            assert found == [CachedTokens(disk=32)] * turn + [CachedTokens()]

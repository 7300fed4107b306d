"""Tiny engines, each started once for all tests and handed out with an empty prefix cache.

Engines of default sizes share their compiled programs, so that a further engine starts in about a second.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import jax
import mappings
import pytest
import tiny_tokenizers
import transformers

from jaxserve.api.config import EngineConfig
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.core.threads import _threads
from jaxserve.execution.program_store import compile_counter
from jaxserve.offline.llm import LLM
from tests import random_runs
from tests.e2e.proposers import PROPOSERS, make_speculate
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.parameters import some_by_default
from tests.soon_compiled import are_few, as_shipped, few_programs

Start = Callable[..., DrivenEngine]

PLAIN_OPTIONS = {"model", "skip_tokenizer_init", "step_ahead", "enable_prefix_caching", *SIZES}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[bot] {% endif %}"
)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama checkpoint with its tokenizer of one token per byte and some merges: 0 is <s>, 1 is </s>."""
    path = tmp_path_factory.mktemp("llama")
    checkpoints.write_checkpoint(path, "llama", vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    tokenizer = tiny_tokenizers.byte_level(VOCAB_SIZE)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tiny_tokenizers.write(path, tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def oracle(llama: Path) -> transformers.PreTrainedModel:
    """Return the model of `llama` as transformers runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(llama).eval()


@pytest.fixture
def share(llama: Path, tmp_path: Path) -> Iterator[Start]:
    """Start engines that share pages in a directory of the test, or in a given store, until the test ends."""
    with contextlib.ExitStack() as stack:

        def share(store: Any = None, **options: Any) -> DrivenEngine:
            own = {"skip_tokenizer_init": True, "kv_store": store or str(tmp_path / "store")}
            engine = DrivenEngine(EngineConfig(**{"model": str(llama), **own, **SIZES, **options}))
            stack.callback(engine.close)
            return engine

        yield share


@pytest.fixture(scope="session")
def engines() -> dict[tuple[tuple[str, Any], ...], DrivenEngine]:
    """Return the engines started so far, by their options."""
    return {}


@pytest.fixture(autouse=True)
def few_engines(engines: dict[tuple[tuple[str, Any], ...], DrivenEngine]) -> Iterator[None]:
    """Drop the engines if they hold many programs; the next test that needs one starts it again."""
    before = (len(engines), compile_counter.count)
    yield
    if before != (len(engines), compile_counter.count) and mappings.are_many():  # counting them takes 30 ms
        engines.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def start(
    llama: Path, engines: dict[tuple[tuple[str, Any], ...], DrivenEngine], request: pytest.FixtureRequest
) -> Start:
    """Start an engine, or reuse the one with the same options, unless a test has closed it.

    Engines of the plain model, whatever its weights, have programs as shipped if they differ in no more than the number
    of tokens in a step. Those of other models or with options of their own have few programs, except in full runs.
    """

    @functools.cache
    def is_plain(model: str) -> bool:
        return build_arch(EngineConfig(model)) == build_arch(EngineConfig(str(llama)))

    def compiling(options: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        if random_runs.are_full():
            return contextlib.nullcontext()
        if not (options.keys() <= PLAIN_OPTIONS and is_plain(options["model"])):
            return few_programs()
        has_same_state = all(options[name] == SIZES[name] for name in SIZES.keys() - {"max_num_batched_tokens"})
        return as_shipped() if has_same_state and not are_few() else contextlib.nullcontext()

    def start(**options: Any) -> DrivenEngine:
        options = {"model": str(llama), "skip_tokenizer_init": True} | SIZES | options
        with compiling(options):
            key = (*sorted(options.items()), ("few_programs", are_few()))
            if key not in engines or engines[key].host.memory.is_closed:
                engines[key] = DrivenEngine(EngineConfig(**options))
        engines[key].reset_prefix_cache()
        return engines[key]

    return start


@pytest.fixture(scope="session")
def llm(llama: Path, engines: dict[tuple[tuple[str, Any], ...], DrivenEngine]) -> LLM:
    """Return the offline interface over the same programs, with the tokenizer."""
    with as_shipped():
        llm = LLM.over(DrivenEngine(EngineConfig(str(llama), **SIZES)))
    engines[("llm", True),] = llm.engine
    return llm


@pytest.fixture(scope="session")
def speculate(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SpeculationConfig]:
    """Return a configuration by the name of a proposer; see `make_speculate`."""
    return make_speculate(llama, tmp_path_factory.mktemp)


@pytest.fixture(scope="session", params=some_by_default(PROPOSERS, "ngram", long=["tree"]))
def speculation(request: pytest.FixtureRequest, speculate: Callable[..., SpeculationConfig]) -> SpeculationConfig:
    """Return the configuration of each proposer."""
    return speculate(request.param)


@pytest.fixture(autouse=True)
def drained(engines: dict[tuple[tuple[str, Any], ...], DrivenEngine]) -> Iterator[None]:
    """Check after every test that all requests have ended, all pages are back and nothing was compiled."""
    yield
    for threads in list(_threads):
        with threads.paused():  # closed streams have ended by then
            pass
    for engine in engines.values():
        unfinished = list(engine.frontend._groups)
        for request_id in unfinished:
            engine.abort(request_id)  # a failure must not fail later tests
        assert not unfinished
        assert engine.occupancy.num_pages_used == 0
        assert engine.stats.num_compiles == 0
        engine.check_integrity()

"""Engines that share a store of pages."""

from collections.abc import Callable, Sequence

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.store_pages import StorePages
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import generate, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = tokens(33, "shared")
HIT = 32 // SIZES["page_size"] * SIZES["page_size"]  # its tokens in full pages
Share = Callable[..., DrivenEngine]


def store_of(engine: DrivenEngine) -> StorePages:
    """Return an engine's shared store."""
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    store = mover.media[-1]
    assert isinstance(store, StorePages)
    return store


def fill(engine: DrivenEngine, *prompts: list[int]) -> list[Sequence[int]]:
    """Return the tokens for some prompts, whose pages are in the store afterwards."""
    outputs = generate(engine, list(prompts), GREEDY)
    store_of(engine).sync()
    return [output.outputs[0].token_ids for output in outputs]

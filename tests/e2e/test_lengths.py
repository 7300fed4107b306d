"""Rows whose position, cached length and history differ, against transformers with explicit positions and caches.

No feature of the engine makes them differ yet: admissions and pages are changed between the host and the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from scipy.special import log_softmax

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.step_plan import StepPlan
from tests import oracles
from tests.e2e.proposers import tokenizers_of
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import TOLERANCE, generate, tokens
from tests.oracles import has_torch, torch

Start = Callable[..., DrivenEngine]

PAGE_SIZE, NUM_CACHED, NUM_OUTPUT = SIZES["page_size"], 12, 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
PENALISED = replace(PARAMS, logprobs=0, repetition_penalty=1.4)


class Change(NamedTuple):
    """Change of a row that begins behind cached pages.

    Attributes:
        position_offset: positions that are left out before its first token.
        dropped: columns of pages that are dropped from its cache, one behind the other.
    """

    position_offset: int
    dropped: range = range(0)


# Rows of two batches: the last is as ever. Dropped tokens are the first of the sequence, or between others.
CHANGES = (Change(7, range(1, 2)), Change(23), Change(0, range(2)), Change(0))
PREFIX = tokens(NUM_CACHED, "prefix")
PROMPTS = [PREFIX + tokens(count, count) for count in (6, 9, 5, 8)]


@contextmanager
def changed(engine: DrivenEngine, changes: dict[tuple[int, ...], Change]) -> Iterator[None]:
    """Let rows with these prompts differ in their lengths."""
    packer, of_slot = engine.replicas[0].executor.packer, {}
    admissions, new_pages = packer._admissions, packer._new_pages

    def change_admissions(plan: StepPlan, pages: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        for blob in admissions(plan, pages):
            to = packer._admission.views(blob)
            for row, request in enumerate(plan.admitted):
                change = changes[tuple(request.prompt_token_ids)]
                assert to["start"][row] == NUM_CACHED
                to["position_offset"][row] = change.position_offset
                to["end_position"][row] += change.position_offset
                to["cache_offset"][row] = -len(change.dropped) * PAGE_SIZE
            yield blob

    def change_pages(plan: StepPlan) -> NDArray[np.int32]:
        of_slot.update({r.slot: changes[tuple(r.prompt_token_ids)] for r in plan.admitted})
        slot, column, page = new_pages(plan)
        dropped = [of_slot[each].dropped for each in slot]
        is_kept = np.array([c not in each for c, each in zip(column, dropped, strict=True)], bool)
        before = np.array([sum(c >= d for d in each) for c, each in zip(column, dropped, strict=True)], np.int32)
        return np.stack([slot, column - before, page])[:, is_kept]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "_admissions", change_admissions)
        patch.setattr(packer, "_new_pages", change_pages)
        yield


def expected_of(
    model: transformers.PreTrainedModel, prompt: Sequence[int], change: Change, penalty: float
) -> tuple[list[int], list[float]]:
    """Return greedy tokens by transformers with a compacted cache, and their log probabilities."""
    if not has_torch:
        oracles.skip()
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        name = oracles.cache_argument(model)
        model(torch.tensor([prompt[:NUM_CACHED]]), **{name: cache})
        kept = [i for i in range(NUM_CACHED) if i // PAGE_SIZE not in change.dropped]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        ids, logprobs, new = list(prompt), [], list(prompt[NUM_CACHED:])
        while len(logprobs) < NUM_OUTPUT:
            first = len(ids) - len(new) + change.position_offset
            positions = torch.arange(first, first + len(new))[None]
            out = model(torch.tensor([new]), position_ids=positions, **{name: cache})
            logits = out.logits[0, -1].numpy()
            seen = np.isin(np.arange(len(logits)), ids)
            penalised = np.where(logits > 0, logits / penalty, logits * penalty)
            new = [int(np.where(seen, penalised, logits).argmax())]
            logprobs.append(float(log_softmax(logits)[new[0]]))
            ids += new
    return ids[len(prompt) :], logprobs


def check(engine: DrivenEngine, model: transformers.PreTrainedModel, params: SamplingParams = PENALISED) -> None:
    """Compare rows with transformers; without their changes each has other log probabilities."""
    generate(engine, [[*PREFIX, 5]], params)
    with changed(engine, {tuple(prompt): change for prompt, change in zip(PROMPTS, CHANGES, strict=True)}):
        outputs = [*generate(engine, PROMPTS[:2], params), *generate(engine, PROMPTS[2:], params)]
    for prompt, change, output in zip(PROMPTS, CHANGES, outputs, strict=True):
        [completion] = output.outputs
        ids, logprobs = expected_of(model, prompt, change, params.repetition_penalty)
        assert completion.token_ids == ids, change
        if params.logprobs is not None:
            found = [entry[i].logprob for entry, i in zip(completion.logprobs, ids, strict=True)]
            np.testing.assert_allclose(found, logprobs, atol=TOLERANCE, err_msg=str(change))
        _, plain = expected_of(model, prompt, Change(0), params.repetition_penalty)
        assert (change == Change(0)) == np.allclose(logprobs, plain, atol=10 * TOLERANCE)
    engine.reset_prefix_cache()


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "multi-step": {"multi_step": 5},
    "xla": {"attention_backend": "xla", "linear_backend": "xla", "multi_step": 5},
}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "xla" or native.unavailable() is None])
def test_lengths_that_differ(start: Start, oracle: transformers.PreTrainedModel, name: str) -> None:
    check(start(**OPTIONS[name]), oracle)


def test_lengths_of_rows_with_drafts(
    start: Start, oracle: transformers.PreTrainedModel, speculation: SpeculationConfig
) -> None:
    """All tokens of a round are sampled at once, or, with penalties and log probabilities, one after the other."""
    engine = start(speculative_config=speculation, multi_step=8, **tokenizers_of(speculation))
    before = engine.stats.num_drafted_tokens
    for params in (PARAMS, PENALISED):
        check(engine, oracle, params)
    assert engine.stats.num_drafted_tokens > before


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_lengths_of_families(start: Start, tmp_path: Path, family: str) -> None:
    """Learned positions, and rotated latents."""
    model = checkpoints.write_checkpoint(tmp_path, family)
    check(start(model=str(tmp_path)), model)

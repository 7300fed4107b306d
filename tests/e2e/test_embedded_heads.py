"""The heads that are embedded with the default model draft what it would have written."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api.config import DEFAULT_DRAFTS
from jaxserve.api.embedded import embedded_model
from tests.e2e.sizes import EMBEDDED
from tests.parameters import some_by_default
from tests.soon_compiled import few_programs

PROMPTS = Path(__file__).parents[2] / "scripts" / "speculative" / "prompts.jsonl"
# Shares of rounds in which the first token and the second are accepted. One of 4,096 tokens at random never would be.
FLOORS = {"medusa": (0.2, 0.05), "eagle3": (0.6, 0.45)}
GREEDY = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)


def prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def start(**options: Any) -> LLM:
    """Start the default model with few programs."""
    with few_programs():
        return LLM(**EMBEDDED, **options)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of plain decoding."""
    with start() as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]


@pytest.mark.parametrize("method", some_by_default(FLOORS, "medusa"))
@pytest.mark.long
def test_tokens_are_the_models_and_many_were_drafted(method: str, expected: list[list[int]]) -> None:
    drafting = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    with start(speculative_config=drafting) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts(), GREEDY)]
    assert [output.token_ids for output in outputs] == expected
    num_rounds = sum(output.metrics.num_draft_rounds for output in outputs)
    for position, floor in enumerate(FLOORS[method]):
        num_accepted = sum(output.metrics.num_accepted_per_position[position] for output in outputs)
        assert num_accepted > floor * num_rounds > 0


def test_heads_are_small() -> None:
    files = [path for name in DEFAULT_DRAFTS.values() for path in embedded_model(name).glob("*.safetensors")]
    heads = [path for path in files if path.parent.name != DEFAULT_DRAFTS["draft_model"]]
    assert len(heads) == 2
    assert sum(map(size, heads)) < 2e6


def size(path: Path) -> int:
    return path.stat().st_size

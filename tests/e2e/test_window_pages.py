"""Sliding windows: pages behind them serve others, and outputs are those of transformers all the same."""

import dataclasses
from pathlib import Path

import checkpoints
import pytest
from test_oracle import Oracle, Start

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import RequestError
from tests.e2e.workloads import busy_step, drain, generate, tokens
from tests.parameters import mainly

# Window of 9 in pages of 4: a sequence holds 4 pages of a sliding group. A sequence of 60 tokens has 15 of a full one.
NEEDED = {"mistral": 4, **dict.fromkeys(("gemma3", "gemma4", "gemma4_moe", "qwen2", "gpt_neo"), 15 + 4)}
LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", params=mainly(["gemma3"], *sorted({*NEEDED} - {"gemma3"})))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Oracle]:
    path: Path = tmp_path_factory.mktemp(request.param)
    return request.param, path, Oracle(checkpoints.write_checkpoint(path, request.param))


def test_a_sequence_needs_no_more_pages_than_its_windows(
    start: Start, family: tuple[str, Path, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path, oracle = family
    engine: DrivenEngine = start(model=str(path), num_pages=NEEDED[name], multi_step=4)
    assert engine.schedule.kv_groups.num_pages(59) == NEEDED[name]
    output, most = engine.add_request("long", tokens(40, "long"), LONG), 0
    while engine.has_unfinished():
        busy_step(engine)
        most = max(most, engine.occupancy.num_pages_used)
    drain(engine)
    oracle.check_greedy(output, 20)
    assert not output.metrics.num_preemptions
    assert most == NEEDED[name]
    [replica] = engine.replicas
    with monkeypatch.context() as patch:
        fewer = dataclasses.replace(engine.schedule, num_pages=NEEDED[name] - 1)
        patch.setattr(replica.scheduler, "_shard_sizes", fewer)
        with pytest.raises(RequestError, match=f"need {NEEDED[name]} pages"):
            engine.add_request("too long", tokens(40, "long"), LONG)


@pytest.mark.parametrize("options", mainly([{"multi_step": 4}], {}, {"step_ahead": False}), ids=str)
def test_pages_that_change_owners_change_no_tokens(
    start: Start, family: tuple[str, Path, Oracle], options: dict[str, int | bool]
) -> None:
    """Sequences take each other's pages, by preemption and behind windows, and find cached prefixes."""
    name, path, oracle = family
    engine: DrivenEngine = start(model=str(path), num_pages=2 * NEEDED[name], **options)
    shared = tokens(24, "shared")
    prompts = [
        shared[:length] + tokens(extra, n) for n, (length, extra) in enumerate([(24, 9), (0, 30), (20, 2), (8, 21)])
    ]
    for _ in range(2):
        outputs = generate(engine, [*prompts, prompts[0]], LONG)
        for output in outputs:
            oracle.check_greedy(output, 20)
    assert any(output.num_cached_tokens for output in outputs)
    engine.check_integrity()
    assert engine.occupancy.num_pages_used == 0

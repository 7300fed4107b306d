"""The check of determinism finds what is planted, and grades real runs."""

import dataclasses
from collections.abc import Sequence

import checkpoints
import pytest

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.tools.invariance.axes import AXES, Axis, _run
from jaxserve.tools.invariance.check import Finding, check_invariance
from jaxserve.tools.invariance.comparison import compare
from jaxserve.tools.invariance.tables import counterexample, line, summary
from jaxserve.tools.invariance.workload import Job, Sizes, make_jobs

SIZES = Sizes(num_requests=2, prompt_len=32, max_tokens=6)
JOBS = make_jobs(SIZES, 100, frozenset({1, 2}))
GREEDY, SAMPLED = JOBS


def output(job: Job, ids: Sequence[int], logprobs: Sequence[float]) -> RequestOutput:
    tops = [{i: Logprob(p, 1), i + 1: Logprob(p - 0.5, 2)} for i, p in zip(ids, logprobs, strict=True)]
    return RequestOutput("0", None, job.prompt, [CompletionOutput(0, token_ids=list(ids), logprobs=tops)], True)


def test_prompts_have_their_lengths_and_no_special_ids() -> None:
    jobs = make_jobs(Sizes(num_requests=8, prompt_len=96), 50, frozenset(range(10)))
    assert [len(job.prompt) for job in jobs] == [96 - 3 * i for i in range(8)]
    assert all(10 <= token < 50 for job in jobs for token in job.prompt)
    assert [job.is_greedy for job in jobs] == [True, False] * 4


@pytest.mark.parametrize(
    ("logprobs", "ids", "grade"),
    [
        ((-1.0, -2.0), (5, 7), "bitwise"),
        ((-1.0, -2.0000001), (5, 7), "ids"),
        ((-1.0, -2.0), (5, 9), "differs"),
        ((-1.0, -2.0), (6, 7), "differs"),
    ],
)
def test_grades(logprobs: tuple[float, ...], ids: tuple[int, ...], grade: str) -> None:
    agreement = compare([GREEDY], [output(GREEDY, ids, logprobs)], [output(GREEDY, (5, 7), (-1.0, -2.0))])
    assert agreement.grade == grade


def test_a_difference_of_a_token_that_was_not_sampled_is_reported() -> None:
    expected, found = (output(GREEDY, (5, 7), (-1.0, -2.0)) for _ in range(2))
    (tops,) = (each.logprobs for each in found.outputs)
    assert tops is not None
    tops[1][8] = Logprob(-2.75, 2)  # 7 was sampled
    agreement = compare([GREEDY], [found], [expected])
    assert (agreement.grade, agreement.max_logprob_difference) == ("ids", 0.25)


def test_the_first_token_that_differs_is_reported_with_both_log_probabilities() -> None:
    expected = [output(GREEDY, (5, 7), (-1.0, -2.0)), output(SAMPLED, (5, 7), (-1.0, -2.0))]
    found = [output(GREEDY, (5, 7), (-1.0, -2.0)), output(SAMPLED, (5, 8), (-1.0, -2.0))]
    agreement = compare(JOBS, found, expected)
    assert (agreement.num_equal, agreement.num_bitwise) == (1, 1)
    finding = Finding("batch", agreement, "evidence")
    assert "sampled request 1, output token 1: id 7 alone (log probability -2.0" in counterexample(finding)
    assert "id 8 otherwise (log probability -2.5" in summary([finding])
    assert line(finding).startswith("batch            differs  1 of 2 requests have the same ids")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """Findings of the baseline's engine, with a way that swaps the outputs."""
    model = tmp_path_factory.mktemp("llama")
    checkpoints.write_checkpoint(model, "llama")

    def swapped(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
        return [dataclasses.replace(each) for each in _run(engine, jobs)[::-1]]

    planted = Axis("swapped", swapped, lambda stats: "planted")
    absent = Axis("absent", swapped, lambda stats: "")
    refused = Axis("refused", swapped, lambda stats: "planted", lambda sizes: {"kv_cache_dtype": "int3"})
    ways = [axis for axis in AXES if axis.name in ("batch", "arrival", "cache")]
    reported: list[Finding] = []
    found = check_invariance({"model": str(model)}, SIZES, [*ways, planted, absent, refused], reported.append)
    assert reported == found
    return {finding.axis: finding for finding in found}


@pytest.mark.long
def test_an_engine_keeps_its_ids(findings: dict[str, Finding]) -> None:
    for name in ("batch", "arrival", "cache"):
        assert findings[name].grade in ("bitwise", "ids"), findings[name]


@pytest.mark.long
def test_a_planted_difference_is_found(findings: dict[str, Finding]) -> None:
    assert findings["swapped"].grade == "differs"
    assert counterexample(findings["swapped"]).startswith("first counterexample: swapped, greedy request 0, output")


def test_an_axis_without_evidence_or_refused_is_not_graded(findings: dict[str, Finding]) -> None:
    assert findings["absent"].grade == findings["refused"].grade == "not run"
    assert findings["refused"].detail.startswith("kv_cache_dtype must be one of")


@pytest.mark.full
def test_every_axis_runs_on_the_embedded_model() -> None:
    found = {finding.axis: finding for finding in check_invariance({}, Sizes())}
    assert list(found) == [axis.name for axis in AXES]
    for name in found.keys() - {"tensor-parallel"}:  # needs two devices
        assert found[name].grade in ("bitwise", "ids"), found[name]

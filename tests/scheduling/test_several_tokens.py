"""Several tokens that come at once give users the same as single ones."""

import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.execution.sampling import TokenLogprobs
from jaxserve.scheduling.request import Request

NUM_STEPS, NUM_ROWS, ROW = 3, 4, 1
TOKENS = [5, 6, 7]


def group_of(params):
    request = Request("a#0", [1, 2], params, seed=0, max_total_tokens=9)
    return RequestGroup("a", None, [request], None, lambda: 0.0)


def logprobs_of_steps():
    """Return the samples of a multi-step program: all steps of a row, then those of the next."""
    rng = np.random.default_rng(0)
    num_tokens = NUM_ROWS * NUM_STEPS
    return TokenLogprobs(
        logprob=rng.normal(size=num_tokens).astype(np.float32),
        rank=rng.integers(1, 9, size=num_tokens).astype(np.int32),
        top_ids=rng.integers(10, 20, size=(num_tokens, 20)).astype(np.int32),
        top_logprobs=rng.normal(size=(num_tokens, 20)).astype(np.float32),
    )


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_multi_step_logprobs_equal_those_of_each_step(num_tokens):
    params, steps = SamplingParams(logprobs=2), logprobs_of_steps()
    together = group_of(params)
    together.append(0, TOKENS[:num_tokens], None, 0.0, steps, ROW * NUM_STEPS)
    single = group_of(params)
    for step, token_id in enumerate(TOKENS[:num_tokens]):
        position = ROW * NUM_STEPS + step
        of_step = TokenLogprobs(
            *(getattr(steps, name)[position, None] for name in ("logprob", "rank", "top_ids", "top_logprobs"))
        )
        single.append(0, [token_id], None, 0.0, of_step, 0)
    got, expected = (group.output.outputs[0] for group in (together, single))
    assert got.token_ids == expected.token_ids == TOKENS[:num_tokens]
    assert list(got.logprobs) == list(expected.logprobs)
    assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob)

"""Records of rows: what the host packs is what the device reads."""

import jax
import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.execution.sampling import SAMPLING_RECORD, SamplingRows, pack_records
from jaxserve.scheduling.request import Request


def request_of(rng: np.random.Generator) -> Request:
    """Return a request that asks for everything at random."""
    params = SamplingParams(
        top_k=int(rng.integers(-1, 2**31)),
        min_tokens=int(rng.choice([0, 3, 9])),
        max_tokens=9,
        temperature=rng.uniform(0, 2),
        top_p=rng.uniform(0.1, 1),
        min_p=rng.uniform(0, 1),
        presence_penalty=rng.uniform(-2, 2),
        frequency_penalty=rng.uniform(-2, 2),
        repetition_penalty=rng.uniform(0.5, 2),
        logit_bias={1: 1.0} if rng.random() < 0.5 else None,
        allowed_token_ids=[1, 2] if rng.random() < 0.5 else None,
    )
    seed = int(rng.integers(-(2**63), 2**63))
    return Request("name", [5] * int(rng.integers(1, 9)), params, seed, max_total_tokens=12, slot=int(rng.integers(99)))


@pytest.mark.parametrize("num_rows", [0, 1, 64])
def test_device_rows_hold_the_requests_parameters(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    requests = [request_of(rng) for _ in range(num_rows)]
    nowhere = np.zeros(num_rows, np.int32)
    rows = SamplingRows(pack_records(requests), nowhere, nowhere > 0)
    parameters = jax.jit(lambda rows: {name: getattr(rows, name) for name in SAMPLING_RECORD.names or ()})(rows)
    expected = {
        "slot": [r.slot for r in requests],
        "min_history_len": [
            min(r.num_prompt_tokens + r.params.min_tokens, 12) if r.params.min_tokens else 0 for r in requests
        ],
        "use_bias": [1 if r.params.logit_bias else 2 * bool(r.params.allowed_token_ids) for r in requests],
        "seed": [[r.seed % 2**32, (r.seed >> 32) % 2**32] for r in requests],
    }
    for name in SAMPLING_RECORD.names or ():
        wanted = expected.get(name) or [getattr(r.params, name) for r in requests]
        read = np.asarray(parameters[name])
        assert read.dtype == SAMPLING_RECORD[name].base
        np.testing.assert_array_equal(read, np.asarray(wanted, read.dtype).reshape(read.shape), name)

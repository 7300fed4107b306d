"""Cases of ragged paged attention: every backend against the reference, and the reference against torch."""

import math

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import QuantizedPages
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, values_of
from tests.kernels.attention_cases import CASES, pool_error
from tests.kernels.attention_runs import (
    BY_NAME,
    OTHER_SETS,
    SERVING,
    assert_same_pool,
    expected_of,
    live,
    on_backends,
    run,
)
from tests.oracles import torch


def test_case_names_are_unique():
    assert len(BY_NAME) == len(CASES)


# Each case is a program that XLA compiles slowly: by default it runs one case per option, of odd lengths. What only
# data distinguishes, such as rows without tokens, test_attention_properties.py has as examples of one program.
QUICK_ON_XLA = {
    "sinks_window_soft_cap",
    "int8_shared_prefix_written_now",
    "int4_head_dim_128_soft_cap",
    "rope_head_dim_12",
    "tree_window_inside",
}


@pytest.mark.parametrize(
    ("name", "backend"), on_backends(SERVING + OTHER_SETS, dict.fromkeys(BY_NAME, True), on_xla=QUICK_ON_XLA)
)
def test_matches_reference(name, backend):
    case = BY_NAME[name]
    expected, expected_pool = expected_of(name)
    out, pool = run(case, case.arguments(), backend)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert_same_pool(case, pool, expected_pool)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", ["rope_bfloat16", "int8_pages_of_8_rope", "float8_e4m3fn_pages_of_8_rope"])
def test_a_pool_may_be_off_by_one_step(name):
    case = BY_NAME[name]
    pages = case.arguments().kv_pages
    stored = np.asarray(values_of(pages))

    def error_of(steps):
        """Return the error with one vector's largest element (below 2 unless quantised) some steps nearer to zero."""
        largest = np.array(QUANTIZED_MAX.get(case.kv_dtype, 2 - 2**-7), stored.dtype)
        changed = [stored.copy(), stored.copy()]
        changed[0].flat[0] = largest
        changed[1].flat[0] = (largest.view(f"i{stored.itemsize}") - steps).view(stored.dtype)
        right, found = (
            pages._replace(values=x) if isinstance(pages, QuantizedPages) else x for x in map(jax.device_put, changed)
        )
        return pool_error(found, right)

    assert error_of(0) == 0
    assert 0 < error_of(1) <= case.pool_tolerance < error_of(2)


def test_stale_numbers_of_a_pool_must_stay():
    pages = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)

    def error_with(place, value):
        changed = pages.copy()
        changed[place] = value
        return pool_error(*jax.device_put((changed, pages)))

    assert error_with((0, 0), 1) == 0
    assert error_with((0, 1), 0) == math.inf
    assert error_with((1, 0), -np.inf) == math.inf
    assert error_with((1, 1), np.nan) == math.inf


@pytest.mark.parametrize("name", ["mixed", "all_decode_ragged", "shared_prefix", "group_of_4", "window_across_pages"])
def test_reference_matches_torch(name):
    case = BY_NAME[name]
    inputs, kv_pages, layer = case.arguments()
    out, _ = expected_of(name)
    pool, table = np.asarray(kv_pages)[layer], np.asarray(inputs.rows.page_table)
    start = 0
    for row_id, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        tokens = slice(start, start + q_len)
        past = pool[table[row_id, : case.pages_per_row[row_id]]]  # [M, P, 2K, H]
        past = past.reshape(-1, *past.shape[2:])[: kv_len - q_len]
        k = np.concatenate([past[:, 0::2], np.asarray(inputs.k)[tokens]])
        v = np.concatenate([past[:, 1::2], np.asarray(inputs.v)[tokens]])
        distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)[None, :]
        q, k, v = (torch.tensor(x).transpose(0, 1) for x in (np.asarray(inputs.q)[tokens], k, v))
        visible = torch.tensor((distance >= 0) & (distance < (case.window or math.inf)))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        np.testing.assert_allclose(out[tokens], expected.transpose(0, 1).numpy(), rtol=1e-5, atol=1e-5)
        start += q_len

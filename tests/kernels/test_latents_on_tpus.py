"""Attention over latents by the TPU kernel: values and races in the interpreter, what it serves, and its pool."""

import logging
import re

import interpreted
import jax
import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V5E, TPU_V6E
from jaxserve.pallas_kernels.op import log_choice
from jaxserve.pallas_kernels.ragged_paged_attention import Latents, default_page_size, new_pages, select_backend
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import MAX_PAGE_BYTES
from tests.kernels.latent_cases import CASES

BY_NAME = {case.name: case for case in CASES}
QUICK = "one_row_of_one_token"
"""Case of the default run, which shows if the kernel does not run at all."""
RUN = [
    QUICK,
    "stale_nan",
    "no_live_rows",
    "all_decode_ragged",
    "two_prompts_of_many_tiles",
    "shared_prefix_written_now",
    "one_head_without_rotation",
    "pages_of_64_of_published_sizes",
    "bfloat16",
    "float8",
    "tree",
]
DEEPSEEK = {"kind": Latents(512, 64), "num_query_heads": 16, "page_size": None, "kv_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.interpreter) for name in RUN]
)
def test_matches_reference_without_races(name):
    case = BY_NAME[name]
    found = interpreted.run(case, "mosaic_tpu")
    is_wide = case.dtype == case.kv_dtype == "float32"
    assert found.error <= (1e-5 if is_wide else 1e-2)
    # Rotated elements near zero are many float32 steps apart: they depend on how XLA computes the rotation here.
    assert found.pool_error <= (1e-3 if case.has_rope and is_wide else case.pool_tolerance)
    assert found.is_finite
    assert not found.races


@pytest.mark.parametrize("chip", [TPU_V5E, TPU_V6E, TPU7X], ids=lambda chip: chip.topology_name)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("num_query_heads", [16, 20, 32])
def test_serves_the_heads_of_a_chip(chip, kv_dtype, num_query_heads):
    """DeepSeek-V3 has 128 heads on 4 or 8 chips, GLM-4.7-Flash 20 on one."""
    with jax.sharding.use_abstract_mesh(chip.mesh()):
        assert select_backend(**DEEPSEEK | {"num_query_heads": num_query_heads, "kv_dtype": kv_dtype}) == "mosaic_tpu"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_dtype": "float16"}, "not float16"),
        ({"page_size": 8}, "a power of two from 16 to 256 in a pool of bfloat16, not 8"),
        ({"page_size": 16, "kv_dtype": "float8_e4m3fn"}, "from 32 to 256 in a pool of float8_e4m3fn, not 16"),
        ({"num_query_heads": 512}, "1 kv heads of 576 with 512 query heads each do not fit"),
    ],
)
def test_what_it_refuses_is_served_by_xla_with_the_reason_in_the_log(changed, reason, caplog):
    log_choice.cache_clear()
    caplog.set_level(logging.INFO)
    with jax.sharding.use_abstract_mesh(TPU_V6E.mesh()):
        assert select_backend(**DEEPSEEK | changed) == "xla"
    (message,) = (record.getMessage() for record in caplog.records if "ragged_paged_attention" in record.getMessage())
    assert re.search(f"[;(] ?(skipped )?mosaic_tpu: [^;]*{re.escape(reason)}", message)


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes"), [("bfloat16", 640 * 2), ("float32", 640 * 4), ("float8_e4m3fn", 640 + 16)]
)
def test_the_pool_has_its_padding_in_its_shape(kv_dtype, token_bytes):
    """Memory tiles have 128 columns; one of bfloat16 has the scales of 32 tokens."""
    page_size = default_page_size("mosaic_tpu", DEEPSEEK["kind"], kv_dtype)
    sizes = {"num_layers": 2, "num_pages": 3, "page_size": page_size}
    pool = jax.eval_shape(lambda: new_pages("mosaic_tpu", DEEPSEEK["kind"], **sizes, dtype=kv_dtype))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool)) == 2 * 3 * page_size * token_bytes
    assert page_size * 640 * jnp.dtype(kv_dtype).itemsize <= MAX_PAGE_BYTES

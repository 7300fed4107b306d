"""Attention over latents by the Hopper GPU kernel: values and races in the interpreter, and what it serves."""

import interpreted
import jax
import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS, Latents, Problem, select_backend
from tests.kernels.latent_cases import GPU_CASES

ALIKE = [
    "one_row_of_one_token",
    "ragged",
    "shared_prefix",
    "float16",
    "one_head_without_rotation",
    "published_20_heads",
]
"""Cases whose parts occur in others as well: each is slow in the interpreter."""
DEEPSEEK = {"kind": Latents(512, 64), "num_query_heads": 16, "page_size": 16, "kv_dtype": "bfloat16"}


@pytest.mark.interpreter
@pytest.mark.skipif(
    jax.default_backend() != "gpu" and jax.__version_info__ < (0, 11),
    reason="on a CPU GPU kernels need the interpreter of jax 0.11 and later",
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter multiplies stale NaN too
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full if case.name in ALIKE else [], id=case.name) for case in GPU_CASES],
)
def test_latents_match_reference_without_races(case):
    found = interpreted.run(case, "mosaic_gpu")
    assert found.error <= 1e-2
    assert found.pool_error <= case.pool_tolerance
    assert found.is_finite
    assert not found.races


@pytest.mark.parametrize("num_query_heads", [16, 20, 32, 64, 128])
def test_serves_the_heads_of_published_models(num_query_heads):
    sizes = DEEPSEEK | {"num_query_heads": num_query_heads, "page_size": None}
    assert select_backend(**sizes, platform="gpu") == "mosaic_gpu"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_dtype": "float32"}, "not float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "not float8_e4m3fn"),
        ({"kind": Latents(384, 64)}, "rank must be one of"),
        ({"kind": Latents(512, 48)}, "a multiple of 32 up to 64, not 48"),
        ({"kind": Latents(512, 96)}, "a multiple of 32 up to 64, not 96"),
        ({"page_size": 48}, "page_size must be"),
    ],
)
def test_refuses_latents_with_a_reason(changed, reason):
    sizes = DEEPSEEK | changed
    problem = Problem(**sizes | {"kv_dtype": jnp.dtype(sizes["kv_dtype"])}, platform="gpu")
    assert reason in BACKENDS["mosaic_gpu"].unsupported_reason(problem)
    assert select_backend(**sizes, platform="gpu") == "xla"
    on_cpu = Problem(**DEEPSEEK | {"kv_dtype": jnp.dtype("bfloat16")}, platform="cpu")
    assert "GPUs only" in BACKENDS["mosaic_gpu"].unsupported_reason(on_cpu)

"""Kernels for GPUs with warp-level matrix instructions: their values and races in the interpreter of newer versions."""

from types import SimpleNamespace

import interpreted
import jax
import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels import deviceless, warp_mma
from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS, Heads, Latents, select_backend
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from tests.kernels.attention_cases import GPU_CASES

NEEDED_JAX = (0, 12)  # the first with mma
needs_mma = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Pallas has mma from jax 0.12 on")

KERNELS = BACKENDS["mosaic_mma"]
ALWAYS = ("head_dim_64", "group_of_5", "window_across_pages")


def _is_served(case):
    problem = Problem(case.kind, case.num_query_heads, case.page_size, jnp.dtype(case.kv_dtype), "gpu")
    return KERNELS.unsupported_problem(problem) is None


CASES = [case for case in GPU_CASES if _is_served(case)]


@pytest.mark.interpreter
@needs_mma
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on CPU")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter multiplies stale NaN too
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in ALWAYS else pytest.mark.full, id=case.name) for case in CASES],
)
def test_matches_reference_without_races(case):
    found = interpreted.run(case, "mosaic_mma")
    assert found.error <= 1e-2
    assert found.pool_error <= case.pool_tolerance
    assert found.is_finite
    assert not found.races


SERVED = {"kind": Heads(8, 128), "num_query_heads": 32, "page_size": 16, "kv_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_dtype": "int8"}, "int8"),
        ({"kind": Latents(512, 64)}, "latents"),
        ({"kind": Heads(8, 512)}, "512"),
        ({"num_query_heads": 72}, "72/8"),
        ({"page_size": 24}, "24"),
    ],
)
def test_refuses_with_a_reason(changed, reason):
    sizes = {**SERVED, **changed}
    problem = Problem(**sizes | {"kv_dtype": jnp.dtype(sizes["kv_dtype"])}, platform="gpu")
    assert reason in KERNELS.unsupported_reason(problem)


@needs_mma
@pytest.mark.parametrize("chip", [deviceless.A100, deviceless.L4, deviceless.RTX_4090, deviceless.RTX_PRO_6000])
def test_serves_gpus_that_have_no_better_kernel(chip):
    with jax.sharding.use_abstract_mesh(chip.mesh()):
        assert select_backend(**SERVED) == "mosaic_mma"
        narrow = SERVED | {"kind": Heads(8, 32), "page_size": 8}
        is_copied_by_tma = chip.capability == "12.0"
        assert select_backend(**narrow) == ("mosaic_mma" if is_copied_by_tma else "xla")


def test_other_makers_gpus_are_refused(monkeypatch):
    gpu = SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert "does not know" in warp_mma.unsupported_reason()


@needs_mma
def test_hopper_gpus_have_a_better_kernel():
    with jax.sharding.use_abstract_mesh(deviceless.H200.mesh()):
        assert select_backend(**SERVED) == "mosaic_gpu"

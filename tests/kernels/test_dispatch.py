import logging

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.last_layers import inner_block
from jaxserve.pallas_kernels import deviceless
from jaxserve.pallas_kernels.grouped_matmul import default_matmul_backend, grouped_matmul, using_matmul_backend
from jaxserve.pallas_kernels.op import Op, UnsupportedBackendError, log_choice
from jaxserve.pallas_kernels.target import target_platform

OP = Op("op", {"fast": "needs a GPU", "plain": None, "slow": None})  # backends are reasons


def same(reason):
    return reason


def test_auto_takes_the_best_that_supports_the_call():
    assert OP.select("auto", same) == "plain"


def test_auto_logs_its_choice_once(caplog):
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="jaxserve.pallas_kernels.op"):
        for _ in range(3):
            Op("logged_op", OP.backends).select("auto", same)
    assert [record.message for record in caplog.records] == [
        "logged_op: using backend 'plain' (skipped fast: needs a GPU)"
    ]


def test_a_call_that_no_kernel_of_an_accelerator_takes_is_warned_of(caplog):
    """Experts of Qwen1.5-MoE have 1408 columns: 176 on each of eight devices."""
    log_choice.cache_clear()
    experts, sizes = jax.ShapeDtypeStruct((8, 2048, 176), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    with jax.sharding.use_abstract_mesh(deviceless.H200.mesh()):
        jax.eval_shape(grouped_matmul, jax.ShapeDtypeStruct((64, 176), jnp.bfloat16), experts, sizes)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("grouped_matmul: using backend 'xla' (skipped native: ")
    assert "mosaic_gpu: columns of matrices must be a multiple of 32, not 176" in record.message


def test_named_backend_runs():
    assert OP.select("slow", same) == "slow"


def test_named_backend_says_why_it_cannot():
    with pytest.raises(UnsupportedBackendError, match=r"'fast' cannot run this call: needs a GPU.*'plain', 'slow'"):
        OP.select("fast", same)


def test_unknown_name():
    with pytest.raises(UnsupportedBackendError, match=r"must be one of .*'auto'.*got 'tritn'"):
        OP.select("tritn", same)


def test_auto_with_no_backend_lists_every_reason():
    with pytest.raises(UnsupportedBackendError, match="fast: broken; plain: broken; slow: broken"):
        OP.select("auto", lambda _: "broken")


def test_a_named_backend_is_preferred_to_the_default_one():
    x, matrices, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.full(2, 2, jnp.int32)
    with using_matmul_backend("xla"), pytest.raises(UnsupportedBackendError, match="'mosaic_gpu' cannot run this call"):
        grouped_matmul(x, matrices, sizes, backend="mosaic_gpu")


@pytest.mark.parametrize("name", ["H100", "H200", "TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU7X"])
def test_a_chip_is_compiled_for_as_what_it_is(name):
    chip = getattr(deviceless, name)
    with jax.sharding.use_abstract_mesh(chip.mesh()):
        assert target_platform() == chip.platform
    assert target_platform() == "cpu"


def test_layers_are_traced_again_for_other_products():
    """jit does not know that a trace depends on `using_matmul_backend`."""
    seen = []

    def block(x, *, arch=None):
        seen.append(default_matmul_backend())
        return x

    for backend in ("auto", "xla", "auto"):
        with using_matmul_backend(backend):
            inner_block(block, default_matmul_backend())(jnp.ones(2))
    assert seen == ["auto", "xla"]

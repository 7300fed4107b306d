"""Mixtures of experts: routing and sorting against numpy, and the sizes of what is computed."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.errors import ConfigError
from jaxserve.layers.experts import Experts, ExpertWeights, apply_experts, route
from jaxserve.layers.linear import SortedGroups
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform
from jaxserve.pallas_kernels.grouped_matmul import GROUPED_MATMUL
from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint
from jaxserve.tools.quantizer.scheme import QuantizeOptions
from tests.checkpoints import MIXTURES, write_checkpoint
from tests.models.test_parity import TRANSFORMS, load_logits, whole_sequence
from tests.parameters import some_by_default


@pytest.mark.parametrize("normalized", [False, True])
def test_a_token_has_the_experts_of_its_largest_probabilities(normalized):
    logits = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    found, ids = jax.jit(route, static_argnums=1)(logits, Experts(6, 2, 1, normalized))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-probabilities, axis=1)[:, :2]
    wanted = np.take_along_axis(probabilities, order, 1)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(found, wanted / (wanted.sum(1, keepdims=True) if normalized else 1), rtol=1e-5)


@pytest.mark.parametrize("num_experts", [1, 3, 40])
def test_pairs_are_sorted_and_found_again(num_experts):
    ids = np.random.default_rng(0).integers(0, num_experts, (11, 2)).astype(np.int32)
    pairs = jax.jit(SortedGroups.sort, static_argnums=1)(ids.reshape(-1), num_experts)
    np.testing.assert_array_equal(pairs.order, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(np.asarray(pairs.order)[pairs.position], np.arange(22))
    np.testing.assert_array_equal(pairs.sizes, np.bincount(ids.reshape(-1), minlength=num_experts))


def test_pairs_of_other_devices_and_of_padding_come_last_and_have_no_products():
    """The second of four devices has experts 2 and 3 of 8, and token 5 is padding."""
    ids = np.random.default_rng(0).integers(0, 8, (11, 2)).astype(np.int32)
    ids[5] = 8
    local = np.where((ids >= 2) & (ids < 4), ids - 2, 2)
    pairs = jax.jit(SortedGroups.sort, static_argnums=1)(local.reshape(-1), 2)
    num_own = int(pairs.sizes.sum())
    np.testing.assert_array_equal(pairs.sizes, np.bincount(ids.reshape(-1), minlength=9)[2:4])
    np.testing.assert_array_equal(ids.reshape(-1)[pairs.order][:num_own], np.sort(ids[(ids == 2) | (ids == 3)]))


def test_padding_has_no_experts_and_is_not_counted():
    T, E, k, D, F = 6, 5, 2, 8, 4
    shapes = ((T, D), (E, D), (E * 2 * F, D), (E * D, F))
    rng, experts, live = np.random.default_rng(0), Experts(E, k, F), np.arange(T) < 4
    x, *arrays = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    @jax.jit
    def computed(x, arrays, live, counts):
        matrices = ExpertWeights(*arrays)
        tokens = dataclasses.replace(whole_sequence(live), live=live, expert_tokens=counts)
        y, after = apply_experts(x, tokens, matrices, experts)
        return (
            y,
            after,
            apply_experts(x, whole_sequence(live), matrices, experts)[0],
            route(x @ arrays[0].T, experts)[1],
        )

    y, after, wanted, ids = computed(x, arrays, live, np.ones((3, E), np.int32))
    np.testing.assert_array_equal(y, np.where(live[:, None], wanted, 0))
    np.testing.assert_array_equal(after.expert_tokens[0], 1 + np.bincount(np.asarray(ids)[:4].reshape(-1), minlength=E))
    np.testing.assert_array_equal(after.expert_tokens[1:], 1)
    assert int(after.moe_index) == 1


def test_divided_experts_are_multiplied_in_the_same_tiles(monkeypatch):
    """A device has the rows of all experts, of which most belong to those of other devices."""
    T, E, k, D, F, seen = 64, 8, 2, 8, 4, []
    monkeypatch.setattr(jax.lax, "axis_index", lambda _: 1)
    kernel = GROUPED_MATMUL.backends["mosaic_tpu"]
    monkeypatch.setattr(kernel, "unsupported_reason", lambda problem: seen.append(problem) or "of another platform")
    for num_shards in (1, 4):
        experts = Experts(E, k, F, num_shards=num_shards, shard_axis="expert" if num_shards > 1 else None)
        held = experts.num_held
        matrices = ExpertWeights(jnp.ones((E, D)), jnp.ones((held * 2 * F, D)), jnp.ones((held * D, F)))
        jax.eval_shape(partial(apply_experts, experts=experts), jnp.ones((T, D)), whole_sequence(jnp.ones(T)), matrices)
    assert [problem.num_groups for problem in seen] == [8, 8, 2, 2]
    assert {problem.mean_rows for problem in seen} == {T * k // E}


def test_nothing_is_as_large_as_tokens_times_experts_times_sizes():
    T, E, k, D, F = 64, 32, 2, 48, 40
    matrices = ExpertWeights(jnp.ones((E, D)), jnp.ones((E * 2 * F, D)), jnp.ones((E * D, F)))
    traced = jax.make_jaxpr(partial(apply_experts, experts=Experts(E, k, F)))(
        jnp.ones((T, D)), whole_sequence(jnp.ones(T)), matrices
    )
    sizes = [v.aval.size for equation in traced.eqns for v in equation.outvars]
    assert max(sizes) == E * 2 * F * D  # the experts' matrices themselves
    assert sorted(set(sizes))[-3] <= max(T * k * 2 * F, T * E)


@pytest.mark.skipif(len(TRANSFORMS) == 1, reason="compares the native kernels with XLA")
@pytest.mark.parametrize("family", some_by_default(MIXTURES, "olmoe"))
@pytest.mark.parametrize("name", some_by_default(["int8", "int4"], "int8"))
def test_quantised_experts_compute_the_same_in_every_form(tmp_path, family, name):
    """The kernels' products and those of dequantised matrices, one after the other, are those of the same integers."""
    write_checkpoint(tmp_path, family, hidden_size=64)
    form = weight_format(name)
    forms = [partial(make_transform, form=form) for make_transform in TRANSFORMS]
    (_, _, plain, _), (_, _, native, _) = (load_logits(tmp_path, make_transform=make) for make in forms)
    np.testing.assert_allclose(native, plain, rtol=0, atol=1e-4)
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    params = weights.load(tmp_path, specs, jnp.float32, transform=matrix_transform(specs, form))
    assert isinstance(params["layers"][-1]["router"], jax.Array)
    assert not isinstance(params["layers"][-1]["experts_down"], jax.Array)


def test_quantised_checkpoints_of_experts_are_not_made(tmp_path):
    write_checkpoint(tmp_path / "source", "olmoe")
    with pytest.raises(ConfigError, match=r"no experts.*OlmoeForCausalLM.*int8"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "target", QuantizeOptions("int4-rtn"))

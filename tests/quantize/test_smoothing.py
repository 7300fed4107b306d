"""Layers on calibration sequences, and factors moved inside them, against transformers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.models import decoder, registry
from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.layer import empty_stats, layer_outputs, layer_stats
from jaxserve.tools.quantizer.rounding import output_error
from jaxserve.tools.quantizer.smoothing import Channels, InputStats, balance_factors, fold_factors, search_factors
from tests.checkpoints import DELTA, FAMILIES, MIXTURES, reference_logits, write_checkpoint
from tests.parameters import some_by_default
from tests.quant.loaded import UNOPTIMIZED


def layers_of(arch, checkpoint):
    """Yield the parameters and specs of each layer."""
    for layer in range(arch.num_layers):
        specs = [spec for spec in registry.param_specs(arch) if spec.path[:2] == ("layers", layer)]
        specs = [dataclasses.replace(spec, path=spec.path[2:]) for spec in specs]
        yield checkpoint.load(specs, jnp.float32), {spec.path[0]: spec for spec in specs if spec.is_matrix}


@pytest.mark.parametrize(
    "family", some_by_default([family for family in FAMILIES if family not in (*MIXTURES, *DELTA, "gemma4")], "llama")
)
def test_folded_layers_compute_the_logits_of_transformers(tmp_path, family):
    model = write_checkpoint(tmp_path, family)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs = registry.param_specs(arch)
    checkpoint, kind = weights.open_checkpoint(tmp_path, specs), registry.family(arch)
    ids = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 20)).astype(np.int32)
    others = checkpoint.load([spec for spec in specs if spec.path[0] != "layers"], jnp.float32)
    embed = jax.jit(decoder.embed_tokens, static_argnums=1, compiler_options=UNOPTIMIZED)
    x = embed(others, arch, ids.reshape(-1), np.tile(np.arange(20), 2)).reshape(2, 20, -1)
    rng, num_folds, folding = np.random.default_rng(1), 0, {}

    def program(fold, matrices):
        def folded(p, factors):
            return fold_factors(p, fold, matrices, factors, jnp.float32, kind.norm_offset)

        return jax.jit(folded, compiler_options=UNOPTIMIZED)

    for layer, (original, matrices) in enumerate(layers_of(arch, checkpoint)):
        p, plain = original, layer_outputs(original, arch, layer, x)
        for fold in kind.folds:
            channels = Channels.from_fold(fold, matrices)
            factors = np.exp(rng.normal(size=channels.heads * channels.size)).astype(np.float32)
            before = np.asarray(p[fold.target])
            if fold not in folding:  # layers are alike
                folding[fold] = program(fold, matrices)
            p, inputs = folding[fold](p, factors)
            np.testing.assert_allclose(p[fold.target], before * np.asarray(inputs)[None, :], rtol=1e-6)
            assert len(np.unique(np.round(np.asarray(inputs), 4))) > 10
            num_folds += 1
        x = layer_outputs(p, arch, layer, x)
        np.testing.assert_allclose(x, plain, rtol=0, atol=2e-5 * np.abs(plain).max())
    assert num_folds == len(kind.folds) * arch.num_layers > 0

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def logits_of(others, x):
        hidden = kind.norm(x.reshape(40, -1), others["final_norm"], arch.norm_eps)
        return decoder.compute_logits(others, arch, hidden)

    logits = np.asarray(logits_of(others, x)).reshape(2, 20, -1)
    for row, sequence in zip(logits, ids, strict=True):
        np.testing.assert_allclose(row, reference_logits(model, sequence), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """Return a bfloat16 layer of Llama, its statistics, and one folded copy per method."""
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", dtype="bfloat16")
    arch = registry.from_hf_config(weights.read_config(path))
    p, matrices = next(layers_of(arch, weights.open_checkpoint(path, registry.param_specs(arch))))
    scales = np.exp(2 * np.random.default_rng(2).normal(size=64))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 64)) * scales, jnp.float32)
    stats = empty_stats(p, list(matrices))
    for batch in np.asarray(x):
        stats = layer_stats(p, arch, 0, jnp.asarray(batch[None]), stats)
    return arch, p, matrices, x, stats


def test_statistics_are_sums_over_what_matrices_read(layer):
    _, p, _, x, stats = layer
    tokens = np.asarray(x, np.float64).reshape(-1, 64)
    normed = tokens / np.sqrt((tokens**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(p["input_norm"], np.float64)
    np.testing.assert_allclose(stats["qkv_proj"].gram, normed.T @ normed, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stats["qkv_proj"].magnitude, np.abs(normed).sum(0), rtol=1e-5)
    np.testing.assert_allclose(stats["qkv_proj"].peak, np.abs(normed).max(0), rtol=1e-5)
    assert stats["down_proj"].gram.shape == (96, 96)


def test_the_matrix_compensates_rounded_norms(layer):
    arch, p, matrices, x, _ = layer
    fold = registry.family(arch).folds[0]
    factors = jnp.asarray(np.exp(np.random.default_rng(3).normal(size=64)), jnp.float32)
    folded, _ = fold_factors(p, fold, matrices, factors, jnp.bfloat16, 0.0)
    norm = folded["input_norm"]
    np.testing.assert_array_equal(norm, norm.astype(jnp.bfloat16).astype(jnp.float32))
    plain = layer_outputs(p, arch, 0, x)
    np.testing.assert_allclose(layer_outputs(folded, arch, 0, x), plain, rtol=0, atol=1e-5 * np.abs(plain).max())


def test_awq_factors_lower_the_error_of_outputs(layer):
    arch, p, matrices, _, stats = layer
    grid = Grid(4, False, 1, 32, np.dtype(np.float32))
    for fold in registry.family(arch).folds[:2]:
        channels, weight = Channels.from_fold(fold, matrices), p[fold.target]
        factors = search_factors(weight, stats[fold.target], channels, grid)

        @jax.jit
        def errors(weight, gram, factors, channels=channels):
            """Return the errors after scaling by the factors, and without."""

            def error(inputs):
                rounded = grid.rounded(weight * inputs, grid.scales(weight * inputs)) / inputs
                return output_error(weight - rounded, gram)

            inputs = channels.inputs(factors)[None, :]
            return error(inputs), error(jnp.ones_like(inputs))

        found, plain = errors(weight, stats[fold.target].gram, factors)
        assert found <= plain
        if fold.part is None:
            assert found < 0.9 * plain


def test_smoothquant_makes_peaks_of_inputs_and_weights_equal(layer):
    arch, p, matrices, _, stats = layer
    fold = registry.family(arch).folds[0]
    weight = p[fold.target]
    factors = balance_factors(weight, stats[fold.target], Channels.from_fold(fold, matrices), 0.5)
    peaks = np.asarray(jax.jit(InputStats.divided)(stats[fold.target], factors).peak)
    scaled = np.asarray(weight) * np.asarray(factors)[None, :]
    np.testing.assert_allclose(peaks, np.abs(scaled).max(0), rtol=1e-4)
    assert np.ptp(np.log(peaks)) < np.ptp(np.log(stats[fold.target].peak))

"""The decoder's logits against Hugging Face transformers in float32, the oracle, on checkpoints it has written."""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.layers.state_forms import StateRows
from jaxserve.layers.token_context import Attention, TokenContext
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import decoder, registry
from jaxserve.models.params import matrix_transform, stack_layers
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.ragged_paged_attention import HeadMatrices, apply_rope
from tests.checkpoints import FAMILIES, ROPES, hf_dict, reference_logits, write_checkpoint
from tests.own_programs import UNOPTIMIZED
from tests.parameters import mainly, some_by_default
from tests.random_configs import random_configs

NUM_TOKENS = 40  # past the original context of the stretched ropes, and past every window
TOLERANCE = 1e-4
NUM_CASES = 3
# Families whose default case is computed by XLA and by native kernels; other tests compute llama, phi3, deepseek_v3 and
# qwen3_next by XLA.
BOTH_FORMS = ("gpt2", "olmoe", "gpt_oss")
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ORDERED = {  # default cases with two layers of one kind, whose order matters, or fewer than a random config has
    "llama": {"num_hidden_layers": 2},
    "gemma4": {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1},
    "gemma4_moe": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
    "qwen3_5": {"num_hidden_layers": 3, "layer_types": [LINEAR, LINEAR, FULL]},
}
TRANSFORMS = [matrix_transform]
if packed_linear.unsupported("float32", jax.default_backend()) is None:
    TRANSFORMS.append(partial(matrix_transform, native=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseAttention(Attention):
    """Causal attention over one whole sequence, as a dense matrix, and recurrent states from zeros.

    `count` is a sum of layer indices, `shared` the keys and values that further layers read, and `unchosen` the tokens
    that an indexer has left out.
    """

    count: jax.Array
    shared: dict = field(default_factory=dict)
    unchosen: jax.Array | None = None

    def attend(self, q, k, v, layer, sinks, index=None):
        rope, options = layer.rope, layer.attention.options
        T, Q, _ = q.shape
        k, v, shared = layer.options.share(k, v, self.shared)
        unchosen = index and unchosen_tokens(index, rope, layer.attention.kv.top_k)
        unchosen = self.unchosen if layer.attention.shares_choice else unchosen
        matrices = v if isinstance(v, HeadMatrices) and v.terms else None
        if matrices:  # queries have terms: all heads attend to the latents
            (_, nope_dim, rank), rotated_q = v.to_keys.shape, apply_rope(q[..., v.to_keys.shape[1] :], rope)
            q = v.absorb(jnp.concatenate([q[..., :nope_dim], rotated_q], -1))
            v, rope, k = k[..., :rank], None, jnp.concatenate([k[..., :rank], apply_rope(k[..., rank:], rope)], -1)
        elif isinstance(v, HeadMatrices):  # latents, whose rotated elements are the last
            latents, (_, nope_dim, rank) = k[:, 0], v.to_keys.shape
            q = jnp.concatenate([q[..., :nope_dim], apply_rope(q[..., nope_dim:], rope)], -1)
            rotated = jnp.repeat(apply_rope(k[..., rank:], rope), Q, axis=1)
            k = jnp.concatenate([jnp.einsum("tr,qnr->tqn", latents[:, :rank], v.to_keys), rotated], -1)
            v, rope = jnp.einsum("tr,qvr->tqv", latents[:, :rank], v.to_values), None
        q, k = (x if rope is None else apply_rope(x, rope) for x in (q, k))
        k, v = (jnp.repeat(x, Q // k.shape[1], axis=1) for x in (k, v))
        distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
        seen = (distance >= 0) & (distance < (options.window or T))
        scores = jnp.einsum("tqh,sqh->qts", q, k) * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        seen = seen if unchosen is None else seen & ~unchosen
        scores = jnp.where(seen[None], scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (Q, T, 1))], axis=-1)
        out = jnp.einsum("qts,sqh->tqh", jax.nn.softmax(scores)[..., :T], v)
        out = matrices.values(out) if matrices else out
        kept = self.unchosen if self.unchosen is None or unchosen is None else unchosen
        return out, dataclasses.replace(self, count=self.count + layer.index, shared=shared, unchosen=kept)

    def advance(self, inputs, layer):
        T, one = len(inputs[0]), jnp.zeros(1, jnp.int32)
        rows = StateRows(one, one, one, jnp.array([0, T]), jnp.zeros(T, jnp.int32), jnp.arange(T), one, one)
        state = layer.state
        out, _ = state.advance(inputs, rows, state.new(1, 1), jnp.int32(0))
        return out, dataclasses.replace(self, count=self.count + layer.index)


def unchosen_tokens(index, rope, top_k):
    """Return the mask of tokens [T, T] that an indexer leaves out for each query, by a stable sort."""
    q, k = apply_rope(index.q, rope), apply_rope(index.k[:, None], rope)[:, 0]
    scores = jnp.einsum("th,ths->ts", index.weights, jax.nn.relu(jnp.einsum("thd,sd->ths", q, k)))
    scores = jnp.where(jnp.tri(len(k), dtype=bool), scores, -jnp.inf)
    order = jnp.argsort(-scores, axis=1, stable=True)
    return jnp.argsort(order, axis=1) >= top_k


def whole_sequence(token_ids):
    """Return the context of the tokens of one sequence."""
    T = len(token_ids)
    return TokenContext(jnp.arange(T), DenseAttention(jnp.int32(10), unchosen=jnp.zeros((T, T), bool)))


def load_logits(path, *, stacked=False, num_tokens=NUM_TOKENS, make_transform=matrix_transform, max_len=None):
    """Return arch, token ids, logits and the sum of layer indices for the checkpoint at `path`, computed in float32."""
    arch = registry.from_hf_config(weights.read_config(path))
    arch = arch.within(max_len or arch.max_position)
    specs = registry.param_specs(arch)
    params = weights.load(path, specs, jnp.float32, transform=make_transform(specs))
    token_ids = np.random.default_rng(0).integers(0, arch.vocab_size, num_tokens).astype(np.int32)
    params = stacked_layers(params, arch.period, arch.num_first_layers) if stacked else params
    logits, count = run(params, arch, jnp.asarray(token_ids))
    return arch, token_ids, np.asarray(logits), int(count)


@partial(jax.jit, static_argnums=(1, 2), compiler_options=UNOPTIMIZED)
def stacked_layers(params, period, num_first):
    return stack_layers(params, period, num_first=num_first)


@partial(jax.jit, static_argnames="arch", compiler_options=UNOPTIMIZED)
def run(params, arch, token_ids):
    hidden, tokens = decoder.forward(params, arch, token_ids, whole_sequence(token_ids))
    return decoder.compute_logits(params, arch, hidden), tokens.attention.count


def assert_close(logits, expected):
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def has_equal_layers(family):
    """Return whether a random model of a family has layers of one kind alone."""
    arch = registry.from_hf_config(hf_dict(family, **next(random_configs(family, 1, num_layers=2))))
    return decoder.can_scan(arch) and arch.period == 1 and not arch.num_first_layers and arch.state is None


CASES = [
    pytest.param(family, case, marks=pytest.mark.full if case else ())
    for family in FAMILIES
    for case in range(NUM_CASES)
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_random_configs_match_transformers(tmp_path, family, case):
    """The default case has one layer of each kind, at most two, or those of `ORDERED`."""
    num_layers = None if case else 1 if has_equal_layers(family) else 2
    config = list(random_configs(family, NUM_CASES, num_layers=num_layers))[case]
    model = write_checkpoint(tmp_path, family, case, **config | ({} if case else ORDERED.get(family, {})))
    for make_transform in TRANSFORMS if case or family in BOTH_FORMS else TRANSFORMS[-1:]:
        _, token_ids, logits, _ = load_logits(tmp_path, make_transform=make_transform)
        assert_close(logits, reference_logits(model, token_ids))


SCANNED = {
    "llama": ({"num_hidden_layers": 3}, 1),
    "mistral": ({"num_hidden_layers": 3}, 1),
    "gemma2": ({"num_hidden_layers": 5}, 2),
    "gpt2": ({"num_hidden_layers": 3}, 1),
    "gpt_neo": ({"num_hidden_layers": 5, "attention_types": [[["global", "local"], 2], [["global"], 1]]}, 2),
    "granite_swa": ({"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "layer_rope_theta": [1e4, 0] * 2}, 2),
    "olmoe": ({"num_hidden_layers": 3}, 1),
    "qwen3_moe": ({"num_hidden_layers": 5, "decoder_sparse_step": 2}, 2),
    "deepseek_v3": ({"num_hidden_layers": 3, "first_k_dense_replace": 1}, 1),
    "gpt_oss": ({"num_hidden_layers": 5}, 2),
    "qwen3_5": ({"num_hidden_layers": 7, "layer_types": [LINEAR, LINEAR, FULL] * 2 + [LINEAR]}, 3),
    "gemma3": ({"num_hidden_layers": 7, "layer_types": [SLIDING, SLIDING, FULL] * 2 + [SLIDING]}, 3),
}


@pytest.mark.parametrize("family", some_by_default(SCANNED, "deepseek_v3"))
def test_scanned_layers_match_unrolled(tmp_path, family):
    sizes, period = SCANNED[family]
    write_checkpoint(tmp_path, family, **sizes)
    arch, _, unrolled, unrolled_count = load_logits(tmp_path)
    _, _, scanned, scanned_count = load_logits(tmp_path, stacked=True)
    assert arch.period == period
    assert decoder.can_scan(arch)
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=1e-5)
    # The count has met every layer once, with its number in its KV group.
    assert scanned_count == unrolled_count == 10 + sum(kept.position for kept in arch.kv_layout.layers)


def test_scanned_layers_of_quantised_matrices_match_unrolled(tmp_path):
    write_checkpoint(tmp_path, "gemma2", **SCANNED["gemma2"][0])
    make_transform = partial(matrix_transform, form=weight_format("int4"))
    unrolled, scanned = (
        load_logits(tmp_path, stacked=stacked, make_transform=make_transform)[2] for stacked in (False, True)
    )
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=1e-5)


def test_a_first_layer_without_experts_may_have_a_state(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3_next", mlp_only_layers=[0])
    _, token_ids, logits, _ = load_logits(tmp_path)
    assert_close(logits, reference_logits(model, token_ids))


def test_windows_that_do_not_repeat_cannot_scan():
    arch = registry.from_hf_config(hf_dict("qwen2"))
    assert arch.windows == (None, 7)
    assert not decoder.can_scan(arch)


@pytest.mark.parametrize("dtype", mainly(["float16"], "bfloat16"))
def test_half_precision_checkpoints_computed_in_float32(tmp_path, dtype):
    model = write_checkpoint(tmp_path, "qwen3", dtype=dtype)
    arch, token_ids, logits, _ = load_logits(tmp_path)
    assert arch.dtype == dtype
    assert_close(logits, reference_logits(model, token_ids))


def test_sharded_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "one", "mistral")
    write_checkpoint(tmp_path / "several", "mistral", max_shard_size="50KB")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path / "one")))
    one, several = (weights.load(tmp_path / name, specs) for name in ("one", "several"))
    jax.tree.map(np.testing.assert_array_equal, several, one)


@pytest.mark.parametrize(("max_position", "max_len"), [(512, 16), (16, None)])
def test_short_sequences_have_the_short_factors_of_longrope(tmp_path, max_position, max_len):
    model = write_checkpoint(tmp_path, "phi3", max_position_embeddings=max_position)
    _, token_ids, logits, _ = load_logits(tmp_path, num_tokens=16, max_len=max_len)
    assert_close(logits, reference_logits(model, token_ids))


def test_one_token(tmp_path):
    model = write_checkpoint(tmp_path, "llama")
    _, token_ids, logits, _ = load_logits(tmp_path, num_tokens=1)
    assert_close(logits, reference_logits(model, token_ids))


@pytest.mark.parametrize("kind", list(ROPES))
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_older_spelling_of_rope_reads_the_same(kind, type_key):
    new = hf_dict("llama", rope_parameters=ROPES[kind])
    old = {key: value for key, value in new.items() if key not in {"rope_parameters", "dtype"}}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling[type_key] = scaling.pop("rope_type")
    old |= {"rope_scaling": scaling if kind != "default" else None, "torch_dtype": "float32"}
    assert registry.from_hf_config(old) == registry.from_hf_config(new)


def test_older_spelling_in_a_file_reads_the_same(tmp_path):
    write_checkpoint(tmp_path, "llama", rope_parameters=ROPES["llama3"])
    config = weights.read_config(tmp_path)
    arch, scaling = registry.from_hf_config(config), config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert registry.from_hf_config(weights.read_config(tmp_path)) == arch

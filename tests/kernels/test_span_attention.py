"""Attention over spans, by all backends, against a dense softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.span_attention import BACKENDS, Problem, SpanInputs, attend
from tests.parameters import mainly

CASES = [  # lengths of spans, padding, heads, head dim, whether there is RoPE
    ((577,), 0, 2, 64, False),
    ((1, 65, 3, 130, 64), 57, 3, 16, True),
    ((40,), 600, 2, 72, True),
    *mainly([], ((4, 4, 2, 1), 0, 2, 8, True), ((1200, 7), 3, 1, 80, False), ((), 5, 2, 4, True)),
]


def spans_of(lengths, padding):
    """Return spans [2, T] with these lengths, then padding."""
    ends = np.cumsum(lengths, dtype=int)
    bounds = [(end - length, end) for length, end in zip(lengths, ends, strict=True) for _ in range(length)]
    total = sum(lengths)
    return np.array([*bounds, *[(total, total)] * padding], np.int32).reshape(-1, 2).T


def dense(inputs, scale):
    """Return the outputs of a dense softmax; zeros for empty spans."""
    q, k, v = (np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v))
    if inputs.rope is not None:
        cos, sin = (np.asarray(x, np.float64)[:, None] for x in inputs.rope)

        def rotate(x):
            first, second = np.split(x, 2, axis=-1)
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

        q, k = rotate(q), rotate(k)
    out = np.zeros_like(q)
    for token, (first, end) in enumerate(np.asarray(inputs.spans).T):
        if end > first:
            scores = np.einsum("hd,khd->hk", q[token], k[first:end]) * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), v[first:end])
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_a_dense_softmax(backend, case):
    if (reason := BACKENDS[backend].unsupported_reason(Problem("cpu"))) is not None:
        pytest.skip(reason)
    lengths, padding, heads, head_dim, has_rope = case
    rng, spans = np.random.default_rng(0), spans_of(lengths, padding)
    T = spans.shape[1]
    q, k, v = (jnp.asarray(rng.standard_normal((T, heads, head_dim)), jnp.float32) for _ in range(3))
    angles = rng.uniform(-3, 3, (T, head_dim // 2))
    rope = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)]), jnp.float32) if has_rope else None
    inputs = SpanInputs(q, k, v, jnp.asarray(spans), rope)
    out = jax.jit(lambda inputs: attend(inputs, 0.3, backend=backend))(inputs)
    np.testing.assert_allclose(out, dense(inputs, 0.3), rtol=0, atol=5e-6)


@pytest.mark.skipif(native.unavailable() is not None, reason="there are no native kernels")
def test_spans_with_gaps_are_refused():
    x, spans = jnp.zeros((4, 1, 8)), jnp.array([[0, 0, 3, 3], [2, 2, 4, 4]], jnp.int32)
    with pytest.raises(Exception, match="each span must begin where the one before it ends"):
        jax.block_until_ready(attend(SpanInputs(x, x, x, spans), 1.0, backend="native"))

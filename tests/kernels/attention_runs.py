"""Runs of ragged paged attention on any backend, and comparisons of their pools."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.lowering import known_options
from jaxserve.execution.step import step_options
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    AttentionOptions,
    Heads,
    Latents,
    PagesToRead,
    QuantizedPages,
    from_canonical,
    ragged_paged_attention,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.pallas_kernels.ragged_paged_attention.layout import HeadMajor, TransposedKeys
from tests.kernels import attention_reference
from tests.kernels.attention_cases import CASES, Case, pool_error

OPTIONS = AttentionOptions(1.0)


def serving(kind):
    """Return the names of backends that run here with this kind of vectors."""
    problem = Problem(kind, 4, 16, jnp.dtype("float32"), jax.default_backend())
    return [name for name, backend in BACKENDS.items() if backend.unsupported_reason(problem) is None]


SERVING = serving(Heads(2, 32))
# The best instruction set serves; the others must be right as well, if there are any. One that multiplies bytes too
# has the attention of the plain instruction set.
SAME_ATTENTION = ("avx512", "avxvnni", "neondot")
OTHERS = [name for name in native.instruction_sets()[1:] if name not in SAME_ATTENTION] if "native" in SERVING else []
OTHER_SETS = [f"native:{name}" for name in OTHERS]
WITH_SCALES = ("int8", "float8_e4m3fn")
BY_NAME = {case.name: case for case in CASES}

UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # options that compile programs soon
compiled = functools.partial(
    jax.jit, ragged_paged_attention, static_argnames=("options", "backend"), donate_argnames="kv_pages"
)
jitted = compiled(compiler_options=UNOPTIMIZED)
jitted_as_shipped = compiled(compiler_options=known_options(step_options(jax.devices()[0].device_kind)))

# One program for each shape of a pool, which makes a copy that can be donated.
in_one = functools.partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMIZED)
stored_by_xla = in_one(lambda backend, pages: jax.tree.map(jnp.copy, from_canonical(backend, pages)))
canonical_by_xla = jax.jit(to_canonical, static_argnums=(0, 2), compiler_options=UNOPTIMIZED)


def stored(backend, pages):
    """Return a copy of canonical pages in a backend's layout, without a program if it is a layout of CPUs."""
    if not issubclass(BACKENDS[backend].layout, HeadMajor):
        return stored_by_xla(backend, pages)
    pages = jax.tree.map(np.asarray, pages)
    if jax.tree.leaves(pages)[0].ndim == 5:  # no latents
        pages = jax.tree.map(lambda x: x.swapaxes(2, 3), pages)
        pages = with_keys(backend, pages, lambda keys: keys.swapaxes(3, 4))
    return jax.device_put(pages, may_alias=False)


def canonical(backend, pages, kind):
    """Invert `stored`, to arrays on the host if it is a layout of CPUs."""
    if not issubclass(BACKENDS[backend].layout, HeadMajor):
        return jax.tree.map(np.asarray, canonical_by_xla(backend, pages, kind))
    pages = jax.tree.map(np.asarray, pages)
    *_, P, H = jax.tree.leaves(pages)[0].shape
    if isinstance(kind, Latents):
        return pages
    turned = with_keys(backend, pages, lambda keys: keys.reshape(*keys.shape[:3], H, P).swapaxes(3, 4))
    return jax.tree.map(lambda x: x.swapaxes(2, 3), turned)


def with_keys(backend, pages, turn):
    """Return head-major pages on the host, their keys turned if the layout has transposed ones."""
    if not issubclass(BACKENDS[backend].layout, TransposedKeys):
        return pages
    values = np.array(pages.values if isinstance(pages, QuantizedPages) else pages)
    keys = turn(values[:, :, 0::2])
    values[:, :, 0::2] = keys.reshape(values[:, :, 0::2].shape)
    return pages._replace(values=values) if isinstance(pages, QuantizedPages) else values


def run(case, arguments, backend, jitted=jitted):
    """Return the output of all tokens and the pool in canonical layout.

    Args:
      case: case whose options are used.
      arguments: arguments of the call, on the host or a device.
      backend: "reference", the name of a backend or "NAME:INSTRUCTION SET".
      jitted: the jitted operation.
    """
    name, _, instruction_set = backend.partition(":")
    if instruction_set:
        with native.using(instruction_set):
            return run(case, arguments, name, jitted)
    if name == "reference":
        inputs, kv_pages = jax.device_put(arguments[:2])
        out, pool = attention_reference.write_and_attend(inputs, kv_pages, arguments.layer, case.options)
    else:
        pool = stored(name, arguments.kv_pages)
        out, pool = jitted(arguments.inputs, pool, arguments.layer, case.options, backend=name)
        pool = canonical(name, pool, case.kind)
    return np.asarray(out).astype(np.float32), jax.tree.map(np.asarray, pool)


def on_backends(backends, names, *, on_xla):
    """Return a parameter for each case and backend, of which the default run has some on XLA, which compiles slowly.

    Args:
      backends: backends, with instruction sets.
      names: cases; True for those of the default run, False for those of the full one.
      on_xla: cases of the default run on XLA.
    """
    assert set(on_xla) <= {name for name, is_quick in names.items() if is_quick}
    return [
        pytest.param(
            name,
            backend,
            id=f"{name}-{backend}",
            marks=[] if is_quick and (backend != "xla" or name in on_xla) else pytest.mark.full,
        )
        for name, is_quick in names.items()
        for backend in backends
    ]


def some_pages(case, width, seed=0):
    """Return random pages to read of each row of a case, those that the step writes to among them, and garbage."""
    rng, R = np.random.default_rng(seed), len(case.q_lens) + case.padding_rows
    columns, num_skipped = (rng.integers(-100, 100, shape).astype(np.int32) for shape in ((R, width), R))
    rows = zip(case.q_lens, case.kv_lens, case.pages_per_row, strict=True)
    for row, (q_len, kv_len, num_pages) in enumerate(rows):
        is_read = rng.random(num_pages) < 0.5
        is_read[(kv_len - q_len) // case.page_size :] = True
        columns[row, : is_read.sum()] = np.flatnonzero(is_read)
        num_skipped[row] = num_pages - is_read.sum()
    return PagesToRead(columns, num_skipped)


class ReadInPart(Case):
    """Case whose rows read random pages of theirs."""

    def arguments(self, seed=0):
        arguments = super().arguments(seed)
        return arguments.changed(pages_to_read=some_pages(self, max(self.pages_per_row)))


def live(case, out):
    return out[: case.num_live]


def assert_same_pool(case, pool, expected):
    """Check that pools are bit-identical, except for the rounding of rotated keys."""
    if case.kv_dtype == "int4":
        values = slice(1, None, 2)
        np.testing.assert_array_equal(pool[..., values, :], expected[..., values, :])
        assert pool_error(*map(jnp.asarray, (pool, expected))) <= case.pool_tolerance
    elif isinstance(pool, QuantizedPages):
        assert_same_heads(case, pool.values, expected.values, case.kv_dtype)
        assert_same_heads(case, pool.scales, expected.scales, "bfloat16")
    else:
        assert_same_heads(case, pool, expected, case.kv_dtype)


def assert_same_heads(case, pool, expected, dtype):
    pool, expected = (np.asarray(x, np.float32).reshape(*x.shape[:4], -1) for x in (pool, expected))
    keys, values = slice(None, None, 2), slice(1, None, 2)
    rounding = {"rtol": 0, "atol": 0}
    if case.has_rope:
        rounding = {"rtol": 0, "atol": 1} if dtype == "int8" else {"rtol": float(jnp.finfo(dtype).eps), "atol": 1e-6}
    np.testing.assert_allclose(pool[..., keys, :], expected[..., keys, :], **rounding)
    np.testing.assert_array_equal(pool[..., values, :], expected[..., values, :])


@functools.cache
def expected_of(name):
    return run(BY_NAME[name], BY_NAME[name].arguments(), "reference")

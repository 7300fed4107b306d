"""Grouped products of every backend against numpy in float64: any sizes of groups, empty ones and a single one."""

import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.pallas_kernels import native, packed_linear
from jaxserve.pallas_kernels.grouped_matmul import GROUPED_MATMUL, grouped_matmul
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from tests.parameters import mainly
from tests.random_runs import examples

REASON = packed_linear.unsupported("float32", jax.default_backend())
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FORMS = ["xla", pytest.param("native", marks=needs_native), pytest.param("gated", marks=needs_native)]
NUM_ROWS = 60  # number of random groups
SIZES = [(5, 40, 33), (3, 16, 64), (8, 64, 256)]  # groups, outputs, inputs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected(x, weight, group_sizes):
    """Return the products in float64, with zeros behind the last group."""
    starts = np.concatenate([[0], np.cumsum(group_sizes)])
    products = [x[a:b].astype(np.float64) @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)]
    return np.concatenate([*products, np.zeros((len(x) - starts[-1], weight.shape[1]))])


def swiglu(y):
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def pack(weight, **options):
    """Pack matrices `[G, N, K]`."""
    flat = weight.reshape(-1, weight.shape[2])
    return packed_linear.pack(jnp.asarray(flat), num_matrices=len(weight), **options)


product = jax.jit(grouped_matmul, static_argnames="backend", compiler_options={"xla_backend_optimization_level": 0})


def multiply(form, weight, x, group_sizes):
    matrices = jnp.asarray(weight) if form == "xla" else pack(weight, gated=form == "gated")
    backend = "xla" if form == "xla" else "native"
    return np.asarray(product(x, matrices, np.array(group_sizes, np.int32), backend=backend))


def assert_right(form, weight, x, group_sizes):
    wanted = expected(x, weight, group_sizes)
    wanted = swiglu(wanted) if form == "gated" else wanted
    y = multiply(form, weight, x, group_sizes)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * weight.shape[2] ** 0.5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("num_rows", mainly([1, 37], 300, 2000))
def test_products_match_numpy(form, shape, num_rows):
    """Random groups, some of them empty; all rows in one group; rows in no group."""
    num_groups, _, K = shape
    weight, x, rng = normal(*shape), normal(num_rows, K, seed=1), np.random.default_rng(num_rows)
    sparse = rng.dirichlet(np.full(num_groups, 0.3))
    last = [0] * (num_groups - 1) + [num_rows]
    for sizes in (
        rng.multinomial(num_rows, sparse),
        last,
        last[::-1],
        [0] * num_groups,
        rng.multinomial(num_rows // 2, sparse),
    ):
        assert_right(form, weight, x, sizes)


@needs_native
@pytest.mark.parametrize("instruction_set", native.instruction_sets() if REASON is None else [])
@settings(max_examples=examples(20))
@given(bounds=st.lists(st.integers(0, NUM_ROWS), min_size=4, max_size=4))
@example(bounds=[0, 0, 0, 0])
@example(bounds=[NUM_ROWS] * 4)
@example(bounds=[7, 7, 50, NUM_ROWS])
def test_every_instruction_set_takes_any_groups(instruction_set, bounds):
    """Groups end at the sorted bounds; rows after the last are in none."""
    weight, sizes = normal(4, 24, 20), np.diff([0, *sorted(bounds)])
    with native.using(instruction_set):
        for form in ("native", "gated"):
            assert_right(form, weight, normal(NUM_ROWS, 20, seed=1), sizes)


@needs_native
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_in_any_company(gated):
    """Products are those of `packed_linear` with the matrix of the group, to the bit."""
    weight, x, sizes = normal(4, 48, 300), normal(60, 300, seed=1), [1, 0, 45, 14]
    multiply_alone = jax.jit(packed_linear.multiply)
    y = multiply("gated" if gated else "native", weight, x, sizes)
    for group, (start, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        alone = packed_linear.pack(jnp.asarray(weight[group]), gated=gated)
        for row in range(start, start + size):
            one = multiply_alone(alone, x[row : row + 1])
            np.testing.assert_array_equal(y[row : row + 1], one)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_read_exactly(dtype):
    sizes = np.array([2, 0, 28], np.int32)
    weight = np.asarray(jnp.asarray(normal(3, 32, 64), dtype).astype(jnp.float32))
    for start in range(0, 64, 2):  # sums with one term
        unit = np.eye(64, dtype=np.float32)[np.arange(start, start + 30) % 64]
        y = product(unit, pack(jnp.asarray(weight, dtype)), sizes)
        np.testing.assert_array_equal(y, expected(unit, weight, sizes))
    rng = np.random.default_rng(0)  # sums of integers are exact in any order
    weight, x = (
        rng.integers(-255, 256, (3, 32, 64)).astype(np.float32),
        rng.integers(-99, 100, (30, 64)).astype(np.float32),
    )
    half = pack(jnp.asarray(weight, dtype))
    np.testing.assert_array_equal(product(x, half, sizes), multiply("native", weight, x, sizes))


@needs_native
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
def test_integers_have_the_scales_of_their_group(dtype):
    rng = np.random.default_rng(0)
    low, high = {"int8": (-127, 128), "int4": (-8, 8), "uint4": (0, 16)}[dtype]
    elements, scales = rng.integers(low, high, (3, 32, 64)), rng.uniform(0.5, 2, (3, 32, 4)).astype(np.float32) / high
    zeros = rng.integers(0, 16, (3, 32, 4)) if dtype == "uint4" else None
    real = elements.reshape(3, 32, 4, 16) - (0 if zeros is None else zeros[..., None])
    real = (real * scales[..., None].astype(np.float64)).reshape(3, 32, 64)
    flat = [None if a is None else jnp.asarray(a.reshape(96, -1)) for a in (elements, scales, zeros)]
    packed = packed_linear.pack(flat[0].astype(dtype), *flat[1:], num_matrices=3)
    for sizes in ([0, 1, 0], [20, 0, 17]):
        x = normal(sum(sizes), 64, seed=1)
        y = product(x, packed, np.array(sizes, np.int32))
        np.testing.assert_allclose(y, expected(x, real, sizes), rtol=0, atol=1e-4)


PROTECTED = """
import ctypes, sys
import jax, jax.numpy as jnp, numpy as np
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul

G, N, K, chosen, hidden = 6, 32, 1024, {1, 4}, set(map(int, sys.argv[1].split(",")))
packed = packed_linear.pack(np.ones((G * N, K), np.float32), num_matrices=G)
sizes = np.array([g in chosen for g in range(G)], np.int32)
product = jax.jit(grouped_matmul).lower(np.ones((2, K), np.float32), packed, sizes).compile()
x = jnp.ones((2, K), jnp.float32)
start = packed.weights.unsafe_buffer_pointer()
size = N * K * 4
assert start % 4096 == 0 and size % 4096 == 0 and packed.weights.nbytes == G * size
for g in hidden:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + g * size), ctypes.c_size_t(size), 0) == 0
np.testing.assert_allclose(product(x, packed, sizes), K)
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages of memory as Linux does")
@pytest.mark.parametrize(("hidden", "signal_number"), [("0,2,3,5", 0), ("4", signal.SIGSEGV)])
def test_weights_of_empty_groups_are_not_read(hidden, signal_number):
    """Reading a page that is protected ends the process."""
    code = subprocess.run([sys.executable, "-c", PROTECTED, hidden], check=False, capture_output=True).returncode
    assert code == -signal_number


def test_bad_calls_say_what_must_hold():
    x, weight, sizes = map(jnp.asarray, (normal(4, 8), normal(3, 5, 8), np.array([1, 2, 1], np.int32)))
    with pytest.raises(ValueError, match=r"x must be \[M, 8\]"):
        grouped_matmul(x[:, :7], weight, sizes)
    with pytest.raises(ValueError, match=r"group_sizes must be int32 of shape \(3,\).*\(2,\)"):
        grouped_matmul(x, weight, sizes[:2])
    with pytest.raises(ValueError, match=r"must be \[layers, G \* N, K\] for 3 groups, got \(3, 5, 8\)"):
        grouped_matmul(x, weight, sizes, layer=0)
    with pytest.raises(UnsupportedBackendError, match=r"'native' cannot run this call.*xla"):
        grouped_matmul(x, weight, sizes, backend="native")
    assert list(GROUPED_MATMUL.backends) == ["native", "mosaic_gpu", "mosaic_tpu", "xla"]


@needs_native
def test_packed_matrices_are_for_the_native_kernels():
    with pytest.raises(UnsupportedBackendError, match="packed"):
        grouped_matmul(jnp.ones((4, 8)), pack(normal(3, 16, 8)), jnp.array([1, 2, 1], jnp.int32), backend="xla")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no more tokens"):
        multiply("native", normal(3, 16, 8), normal(4, 8), [3, 1, 1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="must not be negative"):
        multiply("native", normal(3, 16, 8), normal(4, 8), [3, -1, 1])

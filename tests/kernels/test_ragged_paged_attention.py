import dataclasses
import functools
import math
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.dispatch import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    AttentionInputs,
    AttentionOptions,
    PoolDims,
    QuantizedPages,
    RaggedRows,
    from_canonical,
    move_tokens,
    new_pages,
    ragged_paged_attention,
    reference,
    select_backend,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.cases import CASES, Case, ancestors, pool_error
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED_MAX,
    decode,
    dequantize,
    encode,
    quantize,
    values_of,
)
from tests.parameters import mainly, seeds
from tests.random_runs import examples

OPTIONS = AttentionOptions(1.0)
PLAIN = Problem(4, 2, 32, 16, jnp.dtype("float32"), jax.default_backend())
SERVING = [name for name in BACKENDS if BACKENDS[name].supports(PLAIN) is None]
# The best instruction set serves; the others must be right as well, if there are any.
OTHER_SETS = [f"native:{name}" for name in native.instruction_sets()[1:]] if "native" in SERVING else []
WITH_SCALES = ("int8", "float8_e4m3fn")
BY_NAME = {case.name: case for case in CASES}

compiled = functools.partial(
    jax.jit,
    ragged_paged_attention,
    static_argnames=("options", "backend"),
    donate_argnames="kv_pages",
)
jitted = compiled()
jitted_soon = compiled(compiler_options={"xla_backend_optimization_level": 0})  # compiles functions called only once

# One program for each shape of a pool, which makes a copy that can be donated.
in_one = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
stored = in_one(lambda backend, pages: jax.tree.map(jnp.copy, from_canonical(backend, pages)))
canonical = in_one(to_canonical)


def run(case, arguments, backend, jitted=jitted):
    """Return the output of all tokens and the pool in canonical layout.

    Args:
      case: case whose options are used.
      arguments: arguments of the call.
      backend: "reference", the name of a backend or "NAME:INSTRUCTION SET".
      jitted: the jitted operation.
    """
    name, _, instruction_set = backend.partition(":")
    if instruction_set:
        with native.using(instruction_set):
            return run(case, arguments, name, jitted)
    if name == "reference":
        out, pool = reference.write_and_attend(*arguments, case.options)
    else:
        pool = stored(name, arguments.kv_pages)
        out, pool = jitted(arguments.inputs, pool, arguments.layer, case.options, backend=name)
        pool = canonical(name, pool)
    return np.asarray(out).astype(np.float32), jax.tree.map(np.asarray, pool)


def live(case, out):
    return out[: sum(case.q_lens)]


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


def test_case_names_are_unique():
    assert len(BY_NAME) == len(CASES)


# Each case is a program that XLA compiles slowly: by default it runs one case per option, of odd lengths.
QUICK_ON_XLA = {
    "rows_without_tokens",
    "two_prompts_of_many_tiles",
    "padding_rows_and_tokens",
    "no_live_rows",
    "window_across_pages",
    "sinks_window_soft_cap",
    "stale_infinity",
    "stale_nan_window",
    "group_of_3",
    "pages_of_256",
    "bfloat16",
    "int8_shared_prefix_window_sinks",
    "float8_e4m3fn_pages_of_8_rope",
    "float8_e4m3fn_stale_nan",
    "int4_pages_of_8_rope",
    "int4_stale_nan",
    "int4_head_dim_128_soft_cap",
    "rope_shared_prefix",
    "rope_head_dim_12",
    "rope_bfloat16_pool",
    "tree_random",
    "tree_window",
    "tree_window_inside",
}
assert set(BY_NAME) > QUICK_ON_XLA


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(
            case,
            backend,
            id=f"{case.name}-{backend}",
            marks=[] if backend != "xla" or case.name in QUICK_ON_XLA else pytest.mark.full,
        )
        for case in CASES
        for backend in SERVING + OTHER_SETS
    ],
)
def test_matches_reference(case, backend):
    expected, expected_pool = expected_of(case.name)
    out, pool = run(case, case.arguments(), backend, jitted_soon)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert_same_pool(case, pool, expected_pool)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", ["rope_bfloat16", "int8_pages_of_8_rope", "float8_e4m3fn_pages_of_8_rope"])
def test_a_pool_may_be_off_by_one_step(name):
    case = BY_NAME[name]
    pages = case.arguments().kv_pages
    stored = np.asarray(values_of(pages))

    def error_of(steps):
        """Return the error with one vector's largest element (below 2 unless quantised) some steps nearer to zero."""
        largest = np.array(QUANTIZED_MAX.get(case.kv_dtype, 2 - 2**-7), stored.dtype)
        changed = [stored.copy(), stored.copy()]
        changed[0].flat[0] = largest
        changed[1].flat[0] = (largest.view(f"i{stored.itemsize}") - steps).view(stored.dtype)
        right, found = (
            pages._replace(values=x) if isinstance(pages, QuantizedPages) else x for x in map(jnp.asarray, changed)
        )
        return pool_error(found, right)

    assert error_of(0) == 0
    assert 0 < error_of(1) <= case.pool_tolerance < error_of(2)


def test_stale_numbers_of_a_pool_must_stay():
    pages = jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]])
    assert pool_error(pages, pages) == 0
    assert pool_error(pages.at[0, 1].set(0), pages) == math.inf
    assert pool_error(pages.at[1, 0].set(-jnp.inf), pages) == math.inf
    assert pool_error(pages.at[1, 1].set(jnp.nan), pages) == math.inf


@pytest.mark.parametrize("name", ["mixed", "all_decode_ragged", "shared_prefix", "group_of_4", "window_across_pages"])
def test_reference_matches_torch(name):
    torch = pytest.importorskip("torch")
    case = BY_NAME[name]
    inputs, kv_pages, layer = case.arguments()
    out, _ = expected_of(name)
    pool, table = np.asarray(kv_pages)[layer], np.asarray(inputs.rows.page_table)
    start = 0
    for row_id, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        tokens = slice(start, start + q_len)
        past = pool[table[row_id, : case.pages_per_row[row_id]]]  # [M, P, 2K, H]
        past = past.reshape(-1, *past.shape[2:])[: kv_len - q_len]
        k = np.concatenate([past[:, 0::2], np.asarray(inputs.k)[tokens]])
        v = np.concatenate([past[:, 1::2], np.asarray(inputs.v)[tokens]])
        distance = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)[None, :]
        q, k, v = (torch.tensor(x).transpose(0, 1) for x in (np.asarray(inputs.q)[tokens], k, v))
        visible = torch.tensor((distance >= 0) & (distance < (case.window or math.inf)))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        np.testing.assert_allclose(out[tokens], expected.transpose(0, 1).numpy(), rtol=1e-5, atol=1e-5)
        start += q_len


# One static shape, so that the random cases below share one program per backend.
MAX_TOKENS, MAX_ROWS, PAGE_SIZE, MAX_PAGES, NUM_PAGES = 24, 5, 4, 6, 40


@st.composite
def ragged_rows(draw):
    """Draw new and past tokens of up to MAX_ROWS rows that fit the one shape."""
    rows, left = [], MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_ROWS))):
        q_len = draw(st.sampled_from([1, 1, 2, 3, 8])) if left >= 8 else min(left, 1)
        rows.append((q_len, draw(st.integers(0, MAX_PAGES * PAGE_SIZE - q_len))))
        left -= q_len
    return rows


def random_arguments(rows, seed, *, num_heads=2, padding_seed=0):
    """Return (case, arguments, seen) of the one shape; `padding_seed` decides everything that must not matter."""
    case = Case(
        "random",
        tuple(q_len for q_len, _ in rows),
        tuple(q_len + past for q_len, past in rows),
        num_kv_heads=num_heads,
        head_dim=8,
        page_size=PAGE_SIZE,
        has_rope=True,
        padding_rows=MAX_ROWS - len(rows),
        padding_tokens=MAX_TOKENS - sum(q_len for q_len, _ in rows),
    )
    arguments = case.arguments(seed)
    host = jax.tree.map(np.asarray, arguments)
    rng = np.random.default_rng(padding_seed)
    num_live = sum(case.q_lens)

    def refill(x, end):  # runs on the host: XLA would compile a program for each length
        return jnp.asarray(np.concatenate([x[:end], rng.normal(0, 100, x[end:].shape)]), x.dtype)

    def garbage(*shape):
        return rng.integers(-(2**20), 2**20, size=shape)

    table = garbage(MAX_ROWS, MAX_PAGES)
    seen = np.zeros((NUM_PAGES + MAX_ROWS * MAX_PAGES, PAGE_SIZE), bool)
    for row_id, num_pages in enumerate(case.pages_per_row):
        table[row_id, :num_pages] = host.inputs.rows.page_table[row_id, :num_pages]
        positions = np.arange(case.kv_lens[row_id])
        seen[table[row_id, positions // PAGE_SIZE], positions % PAGE_SIZE] = True
    pool = rng.normal(0, 100, size=(case.num_layers, *seen.shape, *host.kv_pages.shape[3:])).astype(np.float32)
    seen_here = seen[: case.num_pages]
    pool[:, : case.num_pages][:, seen_here] = host.kv_pages[:, seen_here]
    arguments = arguments.changed(
        **{name: refill(getattr(host.inputs, name), num_live) for name in ("q", "k", "v")},
        rope=jnp.asarray(np.swapaxes(refill(np.swapaxes(host.inputs.rope, 0, 1), num_live), 0, 1)),
        kv_pages=jnp.asarray(pool),
        kv_lens=jnp.asarray(np.concatenate([case.kv_lens, garbage(case.padding_rows)]), jnp.int32),
        cu_q_lens=jnp.asarray(
            np.concatenate([host.inputs.rows.cu_q_lens[: len(rows) + 1], garbage(case.padding_rows)]), jnp.int32
        ),
        page_table=jnp.asarray(table, jnp.int32),
    )
    return case, in_larger_table(arguments, garbage, len(rows)), seen


def in_larger_table(arguments, garbage, num_rows):
    """Return the same step with the pages of its live rows anywhere in a table of more rows."""
    own = np.asarray(arguments.inputs.rows.page_table)
    R, M = own.shape
    table, table_row = garbage(2 * R, M), np.random.default_rng(0).permutation(2 * R)[:R]
    table[table_row] = own
    table_row[num_rows:] = garbage(R - num_rows)
    return arguments.changed(page_table=jnp.asarray(table, jnp.int32), table_row=jnp.asarray(table_row, jnp.int32))


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@settings(max_examples=examples(25))
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1))
def test_random_rows_match_reference(backend, rows, seed):
    case, arguments, _ = random_arguments(rows, seed)
    expected, expected_pool = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, expected_pool)


@pytest.mark.parametrize("backend", SERVING)
@settings(max_examples=examples(25))
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1))
def test_padding_is_inert(backend, rows, seed):
    """Other garbage in padding and stale positions keeps live outputs bit-identical; only live positions change."""
    outs, pools = [], []
    for padding_seed in (1, 2):
        case, arguments, seen = random_arguments(rows, seed, padding_seed=padding_seed)
        out, pool = run(case, arguments, backend)
        before = np.asarray(arguments.kv_pages)
        np.testing.assert_array_equal(pool[:, ~seen], before[:, ~seen])
        np.testing.assert_array_equal(pool[0], before[0])  # the step writes only layer 1
        outs.append(live(case, out))
        pools.append(pool[:, seen])
    np.testing.assert_array_equal(*outs)
    np.testing.assert_array_equal(*pools)


def rolled(x, count, axis=0):
    return jnp.asarray(np.roll(x, -count, axis))


def starting_at(arguments, *, token_id, row_id):
    """Return the same step with this token and row first, and those before them last."""
    inputs = arguments.inputs
    tokens = {name: rolled(getattr(inputs, name), token_id) for name in ("q", "k", "v")}
    rows = {name: rolled(getattr(inputs.rows, name), row_id) for name in ("kv_lens", "table_row")}
    return arguments.changed(**tokens, **rows, rope=rolled(inputs.rope, token_id, axis=1))


@pytest.mark.parametrize("backend", SERVING)
@settings(max_examples=examples(25))
@given(pasts=st.lists(st.integers(0, MAX_PAGES * PAGE_SIZE - 1), min_size=2, max_size=MAX_ROWS), data=st.data())
def test_decode_row_does_not_depend_on_its_neighbours(backend, pasts, data):
    """A row among others has the same bits as alone."""
    rows = [(1, past) for past in pasts]
    case, arguments, _ = random_arguments(rows, seed=3)
    out, _ = run(case, arguments, backend)
    row_id = data.draw(st.integers(0, len(rows) - 1))
    alone = starting_at(arguments, token_id=row_id, row_id=row_id)
    out_alone, _ = run(case, alone.changed(num_rows=jnp.int32(1)), backend)
    np.testing.assert_array_equal(out_alone[0], out[row_id])


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@pytest.mark.parametrize("name", ["mixed", "window_across_pages", "window_inside_a_page", "many_rows_share_a_prefix"])
def test_a_tree_without_branches_is_plain_attention(name, backend):
    """Words of ones give the same bits as no mask."""
    case = BY_NAME[name]
    plain, _ = run(case, case.arguments(), backend, jitted_soon)
    ones = jnp.full(case.num_tokens, -1, jnp.int32)
    chained, _ = run(case, case.arguments().changed(tree_mask=ones), backend, jitted_soon)
    np.testing.assert_array_equal(live(case, chained), live(case, plain))


@st.composite
def drafts(draw):
    """Draw the parents of up to 32 nodes, below zero for roots, and the nodes on the way to one of them."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 32)))]
    path = [draw(st.integers(0, len(parents) - 1))]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return parents, path


@pytest.mark.parametrize("backend", ["reference", *SERVING, *OTHER_SETS])
@pytest.mark.parametrize("window", mainly([40], None, 3))
@settings(max_examples=examples(10))
@given(draft=drafts(), past=st.integers(0, 96))
def test_a_path_of_a_tree_is_a_row_of_its_own(backend, window, draft, past):
    (parents, path), case = draft, Case("tree", (32,), (128,), window=window, has_rope=True)

    def attend(nodes, tree_mask):
        """Attend with some tokens of the case as the only row."""
        tokens, end = np.resize(nodes, 32), [0, len(nodes)]
        rows = {"kv_lens": jnp.asarray([past + len(nodes)], jnp.int32), "cu_q_lens": jnp.asarray(end, jnp.int32)}
        arguments = case.arguments()
        inputs = {name: getattr(arguments.inputs, name)[tokens] for name in ("q", "k", "v")}
        rope = arguments.inputs.rope[:, tokens]
        return run(case, arguments.changed(**inputs, **rows, rope=rope, tree_mask=tree_mask), backend)[0]

    words = np.resize(ancestors(parents), 32)
    in_tree = attend(range(len(parents)), jnp.asarray(words, jnp.int32))
    alone = attend(path, None)
    np.testing.assert_allclose(in_tree[path], alone[: len(path)], rtol=1e-5, atol=1e-5)


WRITTEN_NOW = [case for case in CASES if case.name.endswith("written_now")]


@pytest.mark.parametrize("backend", ["reference", *SERVING, *OTHER_SETS])
@pytest.mark.parametrize("case", WRITTEN_NOW, ids=lambda case: case.name)
def test_rows_attend_to_what_another_row_writes_in_the_same_step(case, backend):
    """The result is as if the row that writes the shared pages had run in an earlier step of its own."""
    arguments, writer, readers = case.arguments(), slice(case.q_lens[0]), slice(case.q_lens[0], sum(case.q_lens))
    together, _ = run(case, arguments, backend, jitted_soon)
    _, written = run(case, arguments.changed(num_rows=jnp.int32(1)), backend, jitted_soon)
    written = jax.tree.map(jnp.asarray, written)
    afterwards, _ = run(case, arguments.changed(kv_pages=written), backend, jitted_soon)
    np.testing.assert_array_equal(live(case, together), live(case, afterwards))
    other_values = arguments.changed(v=arguments.inputs.v.at[writer].multiply(-1))
    other, _ = run(case, other_values, backend, jitted_soon)
    assert (np.abs(other - together)[readers].max(axis=(1, 2)) > 1e-3).all()


# Pages that rows may begin with: two prefixes, a branch of the second, and nothing.
PREFIXES = (tuple(range(4)), tuple(range(4, 12)), (*range(4, 8), *range(12, 20)), ())
NUM_SHARED, SHARING_ROWS, SHARING_TABLE = 20, 12, 16


@st.composite
def sharing_rows(draw):
    """Draw (prefix, tokens after it before the step, new tokens) of SHARING_ROWS rows."""
    row = st.tuples(st.sampled_from(PREFIXES), st.integers(0, 50), st.sampled_from([1, 1, 1, 2]))
    return draw(st.lists(row, min_size=SHARING_ROWS, max_size=SHARING_ROWS))


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@settings(max_examples=examples(25))
@given(rows=sharing_rows(), row_id=st.integers(0, SHARING_ROWS - 1))
def test_rows_that_share_pages_match_reference_and_themselves_alone(backend, rows, row_id):
    q_lens = tuple(q_len for *_, q_len in rows)
    kv_lens = tuple(16 * len(prefix) + past + q_len for prefix, past, q_len in rows)
    case = Case("sharing", q_lens, kv_lens, has_rope=True, padding_tokens=2 * SHARING_ROWS - sum(q_lens))
    arguments, rng = case.arguments(), np.random.default_rng(0)
    table = np.zeros((SHARING_ROWS, SHARING_TABLE), np.int32)
    for number, (prefix, *_) in enumerate(rows):
        own = NUM_SHARED + 4 * number + np.arange(4)
        table[number, : len(prefix) + 4] = [*prefix, *own]
    pool_shape = (case.num_layers, NUM_SHARED + 4 * SHARING_ROWS, *arguments.kv_pages.shape[2:])
    kv_pages = jnp.asarray(rng.normal(size=pool_shape), "float32")
    arguments = arguments.changed(page_table=jnp.asarray(table), kv_pages=kv_pages)
    arguments = in_larger_table(arguments, lambda *shape: np.zeros(shape, int), SHARING_ROWS)
    expected, expected_pool = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, expected_pool)

    start, q_len = sum(q_lens[:row_id]), q_lens[row_id]
    lengths = jnp.asarray([0] + SHARING_ROWS * [q_len], jnp.int32)
    alone = starting_at(arguments, token_id=start, row_id=row_id).changed(cu_q_lens=lengths, num_rows=jnp.int32(1))
    out_alone, _ = run(case, alone, backend)
    np.testing.assert_array_equal(out_alone[:q_len], out[start : start + q_len])


@pytest.mark.parametrize("backend", ["native", *OTHER_SETS] if OTHER_SETS else [])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kv_dtype", ["float32", *WITH_SCALES])
@np.errstate(invalid="ignore")  # the reference casts NaN to int8
def test_what_is_not_a_number_stays_none(backend, name, kv_dtype):
    """A broken model must not give confident text: outputs that see a NaN are NaN, as with the reference."""
    case = dataclasses.replace(BY_NAME["many_rows_share_a_prefix"], kv_dtype=kv_dtype)
    arguments = case.arguments()
    arguments = arguments.changed(**{name: getattr(arguments.inputs, name).at[0, 0, 0].set(jnp.nan)})
    expected, _ = run(case, arguments, "reference")
    out, _ = run(case, arguments, backend)
    assert np.isnan(out[np.isnan(expected)]).all()
    np.testing.assert_allclose(live(case, out)[1:], live(case, expected)[1:], rtol=1e-5, atol=1e-5)  # other rows


def compile_layers(backend, kv_dtype="float32", num_layers=3):
    """Compile several layers over one donated pool; keys of a layer depend on the output of the layer before."""
    T, R, M, Q, K, H, P, N = 32, 8, 64, 4, 2, 32, 16, 2048
    sizes = {"num_layers": num_layers, "num_pages": N, "page_size": P, "num_kv_heads": K, "head_dim": H}
    pool = jax.eval_shape(functools.partial(new_pages, backend, **sizes, dtype=kv_dtype))
    options = AttentionOptions(H**-0.5)

    def step(q, pool, rows):
        for layer in range(num_layers):
            inputs = AttentionInputs(q, q[:, :K], q[:, K:], rows)
            out, pool = ragged_paged_attention(inputs, pool, layer, options, backend=backend)
            q = q + out
        return q, pool

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    rows = RaggedRows(ints(R), ints(R, M), ints(R + 1), ints())
    q = jax.ShapeDtypeStruct((T, Q, H), jnp.float32)
    return jax.jit(step, donate_argnums=1).lower(q, pool, rows).compile(), pool


@pytest.mark.parametrize(("backend", "kv_dtype"), [*((name, "float32") for name in SERVING), (SERVING[0], "int8")])
def test_donated_pool_is_updated_in_place(backend, kv_dtype):
    compiled, pool = compile_layers(backend, kv_dtype)
    leaves = jax.tree.leaves(pool)
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 2**20 < pool_bytes
    for leaf in leaves:
        shape = re.escape(f"[{','.join(map(str, leaf.shape))}]")
        assert re.search(shape, compiled.as_text())
        assert not re.search(rf"= [a-z0-9]+{shape}\S* (copy|transpose)\(", compiled.as_text())


@pytest.mark.parametrize("backend", [name for name in SERVING if name == "native"])
def test_slices_of_one_projection_reach_the_kernel_uncopied(backend):
    case = Case("prefill", (512,), (512,), has_rope=True)
    (inputs, kv_pages, layer), Q, K = case.arguments(), case.num_query_heads, case.num_kv_heads

    def attend(qkv, kv_pages):
        q, k, v = jnp.split(qkv, [Q, Q + K], axis=1)
        return ragged_paged_attention(inputs._replace(q=q, k=k, v=v), kv_pages, layer, case.options, backend=backend)

    qkv = jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1)
    compiled = jax.jit(attend, donate_argnums=1).lower(qkv, from_canonical(backend, kv_pages)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < inputs.k.nbytes


def test_xla_plans_the_rows_once_for_all_layers():
    compiled, _ = compile_layers("xla")
    assert len(re.findall(r" sort\(", compiled.as_text())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_canonical_round_trip(backend):
    canonical = CASES[0].arguments().kv_pages
    pool = from_canonical(backend, canonical)
    L, N, P, KV, H = canonical.shape
    layout, dims = BACKENDS[backend].LAYOUT, PoolDims(L, N, P, KV // 2, H)
    assert pool.shape == layout.kv_shape(dims)
    assert layout.pool_dims(pool.shape) == dims
    np.testing.assert_array_equal(to_canonical(backend, pool), canonical)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", seeds(1))
def test_tokens_move_within_their_rows_and_nothing_else_does(backend, kv_dtype, seed):
    """Check any layout, with pages of 32 tokens, against loops over the canonical pool."""
    rng = np.random.default_rng(seed)
    L, N, P, K, H, R, M, T = 2, 13, 32, 2, 16, 3, 4, 23
    values = rng.standard_normal((L, N, P, 2 * K, H), np.float32)
    narrow = QuantizedPages((9 * values).astype(np.int8), values[..., 0].astype("bfloat16"))
    pool = values if kv_dtype == "float32" else narrow
    page_table, table_row = rng.permutation(N)[: R * M].reshape(R, M), rng.permutation(R)
    first = rng.integers(0, M * P - T, R)
    source = np.sort(rng.integers(0, T, (R, T)), axis=1)
    source[0] = np.arange(T)

    def expected(x):
        x, old = x.copy(), x
        for row, column in np.ndindex(R, T):
            to, place = first[row] + column, first[row] + source[row, column]
            pages = page_table[table_row[row]]
            x[:, pages[to // P], to % P] = old[:, pages[place // P], place % P]
        return x

    def move(kv_pages):
        rows = (jnp.asarray(x, jnp.int32) for x in (page_table, table_row, first, source))
        moved = move_tokens(backend, from_canonical(backend, jax.tree.map(jnp.asarray, kv_pages)), *rows)
        return to_canonical(backend, moved)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(move)(pool), jax.tree.map(expected, pool))


def call(backend="xla", options=OPTIONS, **changes):
    arguments = BY_NAME["mixed"].arguments()
    pool = from_canonical("xla", arguments.kv_pages)
    return ragged_paged_attention(*arguments.changed(kv_pages=pool).changed(**changes), options, backend=backend)


def test_traced_layer_equals_static_layer():
    case = BY_NAME["mixed"]
    outs = [run(case, case.arguments().changed(layer=layer), "xla", jitted_soon)[0] for layer in (1, jnp.int32(1))]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive, got 0\.0"),
    ],
)
def test_bad_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions(1.0, **option)


@pytest.mark.usefixtures("without_jaxtyping")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((30, 3, 32))}, "query heads must be a multiple of kv heads, got 3 and 2"),
        ({"v": jnp.zeros((30, 1, 32))}, r"k, v both \[T, K, H\]"),
        ({"k": jnp.zeros((29, 2, 32)), "v": jnp.zeros((29, 2, 32))}, "agree in tokens and head_dim"),
        ({"kv_lens": jnp.zeros(5)}, r"kv_lens must be int32 of shape \(5,\), got float32"),
        ({"cu_q_lens": jnp.zeros(5, jnp.int32)}, r"cu_q_lens must be int32 of shape \(6,\)"),
        ({"page_table": jnp.zeros((4, 3), jnp.int32)}, r"page_table must be int32 of shape \(5, M\)"),
        ({"table_row": jnp.zeros(4, jnp.int32)}, r"table_row must be int32 of shape \(5,\)"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"sinks": jnp.zeros(3)}, r"shape \(4,\), got \(3,\)"),
        ({"rope": jnp.zeros((2, 30, 8))}, r"rope must be float32 of shape \(2, 30, 16\).*got float32 of shape"),
        ({"rope": jnp.zeros((2, 30, 16), "bfloat16")}, "rope must be float32 .*got bfloat16"),
        ({"tree_mask": jnp.zeros((30, 1), jnp.int32)}, r"tree_mask must be int32 of shape \(30,\), got .* \(30, 1\)"),
        ({"tree_mask": jnp.zeros(30, jnp.uint32)}, r"tree_mask must be int32 of shape \(30,\), got uint32"),
        ({"kv_pages": jnp.zeros((2, 9, 8, 16, 32))}, "kv_pages holds 4 kv heads of 32, k has 2 of 32"),
        ({"kv_pages": jnp.zeros((9, 8, 16, 32))}, r"the pool of this backend must be \[L, N, 2K, P, H\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_unknown_backend_is_refused():
    with pytest.raises(UnsupportedBackendError, match="backend must be one of"):
        call(backend="cudnn")


def test_layout_needs_a_resolved_name():
    sizes = {"num_kv_heads": 2, "head_dim": 32, "page_size": 16}
    with pytest.raises(ValueError, match="resolve it with select_backend first"):
        new_pages("auto", num_layers=1, num_pages=1, **sizes, dtype=jnp.float32)
    name = select_backend("auto", num_query_heads=4, kv_dtype=jnp.float32, **sizes)
    pool = new_pages(name, num_layers=1, num_pages=3, **sizes, dtype=jnp.float32)
    assert pool.shape == (1, 3, 4, 16, 32)


@pytest.mark.parametrize("head_dim", [33, 136])
def test_int4_pool_of_other_heads_is_refused(head_dim):
    sizes = {"num_query_heads": 4, "num_kv_heads": 2, "page_size": 16, "head_dim": head_dim}
    with pytest.raises(UnsupportedBackendError, match=f"head_dim must be even, and above 128 .* not {head_dim}"):
        select_backend("xla", **sizes, kv_dtype="int4")


@pytest.mark.parametrize("dtype", ["int16", "float8_e5m2"])
def test_pool_of_another_dtype_is_refused(dtype):
    sizes = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16}
    with pytest.raises(UnsupportedBackendError, match=rf"the pool must hold floating point numbers .*, not {dtype}"):
        select_backend("xla", **sizes, kv_dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", WITH_SCALES)
def test_quantized_numbers_are_near(dtype):
    """Errors are within half a step, of the scale for int8 and of each element for fp8; no element leaves the range."""
    x = np.random.default_rng(0).normal(0, 10.0 ** np.arange(-3, 4), size=(50, 6, 7)).swapaxes(1, 2).astype("float32")
    x[0] = 0
    values, scales = quantize(jnp.asarray(x), jnp.dtype(dtype))
    found, scale = np.asarray(dequantize(values, scales)), np.asarray(scales, np.float32)[..., None]
    step = scale if dtype == "int8" else np.maximum(np.abs(x) / 8, scale / 2**9)
    assert (np.abs(found - x) <= step * (0.5 + 1e-5)).all()
    assert not found[0].any()
    most, largest = QUANTIZED_MAX[dtype], np.abs(x[1:]).max(axis=-1, keepdims=True)
    assert scales.dtype == jnp.bfloat16
    assert (scale[1:] * most >= largest * (1 - 1e-6)).all()
    assert (scale[1:] * most <= largest * (1 + 2**-7)).all()


@pytest.mark.parametrize("head_dim", [8, 64, 96, 192])
def test_int4_vectors_are_near(head_dim):
    """Errors of rotated vectors are within half a step of their group, beside the rounding of its numbers."""
    x = np.random.default_rng(0).normal(3, 10.0 ** np.arange(-3, 4), size=(head_dim, 50, 7)).T.astype("float32")
    x[0] = 0
    block, size = head_dim & -head_dim, 64 if head_dim % 64 == 0 else head_dim
    stored = encode(jnp.asarray(x), INT4)
    assert stored.nbytes == x.size // 2 + x.size // size * 4
    rotated = x.astype(float).reshape(-1, block) @ scipy.linalg.hadamard(block)
    found, rotated = (np.reshape(each, (7, 50, -1, size)) for each in (decode(stored), rotated))
    step = np.ptp(rotated, axis=-1, keepdims=True) / 15
    rounding = np.abs(rotated).max(axis=-1, keepdims=True) * 2**-8
    assert (np.abs(found - rotated) <= step / 2 + 2 * rounding).all()
    assert not found[0].any()


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [*WITH_SCALES, "int4"])
def test_what_is_not_finite_stays_so_when_quantized(dtype, broken):
    x = jnp.ones((600, 3, 32)).at[1, 2, 3].set(broken)
    found = np.asarray(decode(encode(x, jnp.dtype(dtype))))
    is_broken = np.arange(600 * 3).reshape(600, 3) == 5
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(is_broken[..., None], x.shape))


@pytest.mark.usefixtures("without_jaxtyping")
def test_scales_come_with_the_dtypes_that_need_them():
    sizes = {"num_layers": 2, "num_pages": 9, "page_size": 16, "num_kv_heads": 2, "head_dim": 32}
    quantized, plain = (new_pages("xla", **sizes, dtype=dtype) for dtype in ("int8", "float32"))
    with pytest.raises(ValueError, match="got int8 without scales; use new_pages"):
        call(kv_pages=quantized.values)
    with pytest.raises(ValueError, match="got float32 with scales"):
        call(kv_pages=QuantizedPages(plain, quantized.scales))
    for scales in (quantized.scales[1:], quantized.scales.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"scales .* must have shape \(2, 9, 4, 16\) and be bfloat16, got"):
            call(kv_pages=quantized._replace(scales=scales))


@pytest.mark.parametrize("backend", ["native", "xla"])
def test_pages_for_larger_heads_are_several_of_smaller_ones(backend):
    """Two layers of one head of 8 take the pages of one layer of two heads of 8, each its own half of every page."""
    sizes = {"num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8, "page_size": 4, "kv_dtype": "float32"}
    try:
        select_backend(backend, **sizes)
    except UnsupportedBackendError as reason:
        pytest.skip(str(reason))
    rng, T = np.random.default_rng(0), 6
    q, k, v = (jnp.asarray(rng.normal(size=(T, n, 8)), jnp.float32) for n in (2, 1, 1))
    table = jnp.array([[4, 1], [2, 0]], jnp.int32)
    rows = RaggedRows(jnp.array([6, 2]), table, jnp.array([0, 4, 6]), jnp.int32(2))
    pool = jnp.asarray(rng.normal(size=(1, 5, 4, 4, 8)), jnp.float32)  # [L, N, 2K, P, H] of K = 2
    for part in range(2):
        inputs = AttentionInputs(q, k, v, rows._replace(page_table=2 * table + part))
        own = pool.reshape(1, 10, 2, 4, 8)
        options = AttentionOptions(0.3)
        expected, written = jax.jit(
            functools.partial(ragged_paged_attention, layer=0, options=options, backend=backend)
        )(inputs, own)
        out, pool = jax.jit(
            functools.partial(ragged_paged_attention, layer=0, options=options, num_parts=2, backend=backend)
        )(inputs, pool)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(pool.reshape(own.shape), written)
    with pytest.raises(ValueError, match="a page of 2 kv heads of 8 must be 3 pages of other heads, got 1 of 8"):
        ragged_paged_attention(inputs, pool, 0, options, num_parts=3, backend=backend)

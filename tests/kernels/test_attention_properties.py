"""Properties of attention over random rows: padding, neighbours, draft trees and shared pages change nothing."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.kernels.attention_cases import Case, ancestors
from tests.kernels.attention_runs import (
    BY_NAME,
    OTHER_SETS,
    SERVING,
    WITH_SCALES,
    assert_same_pool,
    jitted_as_shipped,
    live,
    on_backends,
    run,
    some_pages,
)
from tests.parameters import mainly
from tests.random_runs import examples

# One static shape, so that the random cases below share one program per backend.
MAX_TOKENS, MAX_ROWS, PAGE_SIZE, MAX_PAGES, NUM_PAGES = 24, 5, 4, 6, 40


def on_host(arguments):
    """Return arguments that can be changed without a program of XLA for each shape."""
    inputs, kv_pages = jax.tree.map(np.asarray, arguments[:2])
    return arguments._replace(inputs=inputs, kv_pages=kv_pages)


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
    host = on_host(case.arguments(seed))
    rng = np.random.default_rng(padding_seed)
    num_live = sum(case.q_lens)

    def refill(x, end):
        return np.concatenate([x[:end], rng.normal(0, 100, x[end:].shape)], dtype=x.dtype, casting="same_kind")

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
    arguments = host.changed(
        **{name: refill(getattr(host.inputs, name), num_live) for name in ("q", "k", "v")},
        rope=np.swapaxes(refill(np.swapaxes(host.inputs.rope, 0, 1), num_live), 0, 1),
        kv_pages=pool,
        kv_lens=np.concatenate([case.kv_lens, garbage(case.padding_rows)]).astype(np.int32),
        cu_q_lens=np.concatenate([host.inputs.rows.cu_q_lens[: len(rows) + 1], garbage(case.padding_rows)]).astype(
            np.int32
        ),
        page_table=table.astype(np.int32),
    )
    return case, in_larger_table(arguments, garbage, len(rows)), seen


def in_larger_table(arguments, garbage, num_rows):
    """Return the same step with the pages of its live rows anywhere in a table of more rows."""
    own = np.asarray(arguments.inputs.rows.page_table)
    R, M = own.shape
    table, table_row = garbage(2 * R, M), np.random.default_rng(0).permutation(2 * R)[:R]
    table[table_row] = own
    table_row[num_rows:] = garbage(R - num_rows)
    return arguments.changed(page_table=table.astype(np.int32), table_row=table_row.astype(np.int32))


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@settings(max_examples=examples(15))
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1))
@example(rows=[], seed=0)
@example(rows=[(1, 8), (0, 9), (3, 2), (0, 12)], seed=0)
def test_random_rows_match_reference(backend, rows, seed):
    case, arguments, _ = random_arguments(rows, seed)
    expected, expected_pool = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, expected_pool)


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
def test_tokens_past_the_page_table_are_not_written(backend):
    case, arguments, seen = random_arguments([(8, 13), (3, 20)], seed=0)
    rows, spare = arguments.inputs.rows, len(seen) - 1
    table = rows.page_table % len(seen)  # whatever is read past a row of it is a page
    arguments = arguments.changed(kv_lens=rows.kv_lens + np.array([5, 0, 0, 0, 0], np.int32), page_table=table)
    wider = np.pad(table, ((0, 0), (0, 1)), constant_values=spare)
    _, expected = run(case, arguments.changed(page_table=wider), "reference")
    assert (expected[:, spare] != arguments.kv_pages[:, spare]).any(), "the first row has tokens there"
    _, pool = run(case, arguments, backend)
    assert_same_pool(case, pool[:, :spare], expected[:, :spare])


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@settings(max_examples=examples(15))
@given(rows=ragged_rows(), seed=st.integers(0, 2**32 - 1))
@example(rows=[(3, 20), (1, 17), (0, 9), (8, 16)], seed=0)
def test_random_rows_see_the_pages_that_they_read(backend, rows, seed):
    case, arguments, _ = random_arguments(rows, seed)
    arguments = arguments.changed(pages_to_read=some_pages(case, MAX_PAGES, seed))
    expected, expected_pool = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, expected_pool)


READ_IN_PART = {
    "shared_token_written_now": True,
    "int8_shared_prefix_written_now": True,
    "tree_binary": True,
    "tree_sinks_soft_cap": True,
    "pages_of_8": False,
}


@pytest.mark.parametrize(
    ("name", "backend"),
    on_backends(SERVING + OTHER_SETS, READ_IN_PART, on_xla=["tree_binary"]),
)
def test_pages_to_read_beside_other_options(name, backend):
    """Prefixes are shared with a row that writes them in this step, trees lie behind pages that are not read."""
    case = BY_NAME[name]
    arguments = case.arguments()
    plain, plain_pool = run(case, arguments, "reference")
    arguments = arguments.changed(pages_to_read=some_pages(case, max(case.pages_per_row)))
    expected, _ = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, plain_pool)
    assert (np.abs(expected - plain)[: sum(case.q_lens)].max(axis=(1, 2)) > 1e-3).any()


@pytest.mark.parametrize("backend", SERVING)
@settings(max_examples=examples(15))
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
    return np.roll(x, -count, axis)


def starting_at(arguments, *, token_id, row_id):
    """Return the same step with this token and row first, and those before them last."""
    inputs = arguments.inputs
    tokens = {name: rolled(getattr(inputs, name), token_id) for name in ("q", "k", "v")}
    rows = {name: rolled(getattr(inputs.rows, name), row_id) for name in ("kv_lens", "table_row")}
    return arguments.changed(**tokens, **rows, rope=rolled(inputs.rope, token_id, axis=1))


@pytest.mark.parametrize("backend", SERVING)
@settings(max_examples=examples(15))
@given(pasts=st.lists(st.integers(0, MAX_PAGES * PAGE_SIZE - 1), min_size=2, max_size=MAX_ROWS), data=st.data())
def test_decode_row_does_not_depend_on_its_neighbours(backend, pasts, data):
    """A row among others has the same bits as alone, as the engine compiles it."""
    rows = [(1, past) for past in pasts]
    case, arguments, _ = random_arguments(rows, seed=3)
    out, _ = run(case, arguments, backend, jitted_as_shipped)
    row_id = data.draw(st.integers(0, len(rows) - 1))
    alone = starting_at(arguments, token_id=row_id, row_id=row_id)
    out_alone, _ = run(case, alone.changed(num_rows=np.int32(1)), backend, jitted_as_shipped)
    np.testing.assert_array_equal(out_alone[0], out[row_id])


WITHOUT_TREES = {
    "window_across_pages": True,
    "many_rows_share_a_prefix": True,
    "mixed": False,
    "window_inside_a_page": False,
}


@pytest.mark.parametrize(
    ("name", "backend"),
    on_backends(SERVING + OTHER_SETS, WITHOUT_TREES, on_xla=["window_across_pages"]),
)
def test_a_tree_without_branches_is_plain_attention(name, backend):
    """Words of ones give the same bits as no mask."""
    case = BY_NAME[name]
    arguments = case.arguments()
    plain, _ = run(case, arguments, backend)
    chained, _ = run(case, arguments.changed(tree_mask=np.full(case.num_tokens, -1, np.int32)), backend)
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

    arguments = on_host(case.arguments())

    def attend(nodes, tree_mask, backend):
        """Attend with some tokens of the case as the only row."""
        tokens, end = np.resize(nodes, 32), [0, len(nodes)]
        rows = {"kv_lens": np.asarray([past + len(nodes)], np.int32), "cu_q_lens": np.asarray(end, np.int32)}
        inputs = {name: getattr(arguments.inputs, name)[tokens] for name in ("q", "k", "v")}
        rope = arguments.inputs.rope[:, tokens]
        return run(case, arguments.changed(**inputs, **rows, rope=rope, tree_mask=tree_mask), backend)[0]

    words = np.resize(ancestors(parents), 32).astype(np.int32)
    in_tree = attend(range(len(parents)), words, backend)
    alone = attend(path, None, "reference")
    np.testing.assert_allclose(in_tree[path], alone[: len(path)], rtol=1e-5, atol=1e-5)


WRITTEN_NOW = {
    name: name in ("shared_token_written_now", "int8_shared_prefix_written_now")
    for name in BY_NAME
    if name.endswith("written_now")
}


@pytest.mark.parametrize(
    ("name", "backend"),
    on_backends(["reference", *SERVING, *OTHER_SETS], WRITTEN_NOW, on_xla=["int8_shared_prefix_written_now"]),
)
def test_rows_attend_to_what_another_row_writes_in_the_same_step(name, backend):
    """The result is as if the row that writes the shared pages had run in an earlier step of its own."""
    case = BY_NAME[name]
    arguments, num_written = on_host(case.arguments()), case.q_lens[0]
    together, _ = run(case, arguments, backend)
    _, written = run(case, arguments.changed(num_rows=np.int32(1)), backend)
    afterwards, _ = run(case, arguments.changed(kv_pages=written), backend)
    np.testing.assert_array_equal(live(case, together), live(case, afterwards))
    v = arguments.inputs.v.copy()
    v[:num_written] *= -1
    other, _ = run(case, arguments.changed(v=v), backend)
    assert (np.abs(other - together)[num_written : sum(case.q_lens)].max(axis=(1, 2)) > 1e-3).all()


# Pages that rows may begin with: two prefixes, a branch of the second, and nothing.
PREFIXES = (tuple(range(4)), tuple(range(4, 12)), (*range(4, 8), *range(12, 20)), ())
NUM_SHARED, SHARING_ROWS, SHARING_TABLE = 20, 12, 16


@st.composite
def sharing_rows(draw):
    """Draw (prefix, tokens after it before the step, new tokens) of SHARING_ROWS rows."""
    row = st.tuples(st.sampled_from(PREFIXES), st.integers(0, 50), st.sampled_from([1, 1, 1, 2]))
    return draw(st.lists(row, min_size=SHARING_ROWS, max_size=SHARING_ROWS))


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
@settings(max_examples=examples(15))
@given(rows=sharing_rows(), row_id=st.integers(0, SHARING_ROWS - 1))
def test_rows_that_share_pages_match_reference_and_themselves_alone(backend, rows, row_id):
    q_lens = tuple(q_len for *_, q_len in rows)
    kv_lens = tuple(16 * len(prefix) + past + q_len for prefix, past, q_len in rows)
    case = Case("sharing", q_lens, kv_lens, has_rope=True, padding_tokens=2 * SHARING_ROWS - sum(q_lens))
    arguments, rng = on_host(case.arguments()), np.random.default_rng(0)
    table = np.zeros((SHARING_ROWS, SHARING_TABLE), np.int32)
    for number, (prefix, *_) in enumerate(rows):
        own = NUM_SHARED + 4 * number + np.arange(4)
        table[number, : len(prefix) + 4] = [*prefix, *own]
    pool_shape = (case.num_layers, NUM_SHARED + 4 * SHARING_ROWS, *arguments.kv_pages.shape[2:])
    arguments = arguments.changed(page_table=table, kv_pages=rng.normal(size=pool_shape).astype(np.float32))
    arguments = in_larger_table(arguments, lambda *shape: np.zeros(shape, int), SHARING_ROWS)
    expected, expected_pool = run(case, arguments, "reference")
    out, pool = run(case, arguments, backend)
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-5, atol=1e-5)
    assert_same_pool(case, pool, expected_pool)

    start, q_len = sum(q_lens[:row_id]), q_lens[row_id]
    lengths = np.asarray([0] + SHARING_ROWS * [q_len], np.int32)
    alone = starting_at(arguments, token_id=start, row_id=row_id).changed(cu_q_lens=lengths, num_rows=np.int32(1))
    out_alone, _ = run(case, alone, backend)
    np.testing.assert_array_equal(out_alone[:q_len], out[start : start + q_len])


@pytest.mark.parametrize("backend", ["native", *OTHER_SETS] if OTHER_SETS else [])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kv_dtype", ["float32", *WITH_SCALES])
def test_what_is_not_a_number_stays_none(backend, name, kv_dtype):
    """A broken model must not give confident text: outputs that see a NaN are NaN, as with the reference."""
    case = dataclasses.replace(BY_NAME["many_rows_share_a_prefix"], kv_dtype=kv_dtype)
    arguments = on_host(case.arguments())
    broken = getattr(arguments.inputs, name).copy()
    broken[0, 0, 0] = np.nan
    arguments = arguments.changed(**{name: broken})
    expected, _ = run(case, arguments, "reference")
    out, _ = run(case, arguments, backend)
    assert np.isnan(out[np.isnan(expected)]).all()
    np.testing.assert_allclose(live(case, out)[1:], live(case, expected)[1:], rtol=1e-5, atol=1e-5)  # other rows

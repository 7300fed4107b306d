"""Arguments of attention that are refused, and why."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionOptions,
    Heads,
    PagesToRead,
    QuantizedPages,
    from_canonical,
    new_pages,
    ragged_paged_attention,
    select_backend,
)
from tests.kernels.attention_runs import BY_NAME, OPTIONS, run


def call(backend="xla", options=OPTIONS, **changes):
    arguments = BY_NAME["mixed"].arguments()
    pool = from_canonical("xla", arguments.kv_pages)
    return ragged_paged_attention(*arguments.changed(kv_pages=pool).changed(**changes), options, backend=backend)


def test_traced_layer_equals_static_layer():
    case = BY_NAME["mixed"]
    outs = [run(case, case.arguments().changed(layer=layer), "xla")[0] for layer in (1, jnp.int32(1))]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive, got 0\.0"),
        ({"rank": 0}, "rank must be at least 1 or None, got 0"),
        ({"max_queries": -3}, "max_queries must be at least 1 or None, got -3"),
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
        (
            {"pages_to_read": PagesToRead(jnp.zeros((4, 3), jnp.int32), jnp.zeros(5, jnp.int32))},
            r"columns must be int32 of shape \(5, 3\)",
        ),
        (
            {"pages_to_read": PagesToRead(jnp.zeros((5, 3), jnp.int32), jnp.zeros(5))},
            r"num_skipped must be int32 of shape \(5,\), got float32",
        ),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"sinks": jnp.zeros(3)}, r"shape \(4,\), got \(3,\)"),
        ({"rope": jnp.zeros((2, 30, 8))}, r"rope must be float32 of shape \(2, 30, 16\).*got float32 of shape"),
        ({"rope": jnp.zeros((2, 30, 16), "bfloat16")}, "rope must be float32 .*got bfloat16"),
        ({"tree_mask": jnp.zeros((30, 1), jnp.int32)}, r"tree_mask must be int32 of shape \(30,\), got .* \(30, 1\)"),
        ({"tree_mask": jnp.zeros(30, jnp.uint32)}, r"tree_mask must be int32 of shape \(30,\), got uint32"),
        (
            {"kv_pages": jnp.zeros((2, 9, 8, 16, 32))},
            r"must have shape \(2, 9, 4, 16, 32\) for 2 kv heads of 32",
        ),
        ({"kv_pages": jnp.zeros((9, 8, 16, 32))}, r"must have shape \(9, 8, 4, 16, 32\) for 2 kv heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_a_window_does_not_go_with_pages_to_read():
    arguments = BY_NAME["mixed"].arguments()
    rows = arguments.inputs.rows
    pages = PagesToRead(jnp.zeros_like(rows.page_table), jnp.zeros_like(rows.kv_lens))
    with pytest.raises(ValueError, match="pages_to_read must be None in a layer with a window, got a window of 7"):
        call(options=AttentionOptions(1.0, window=7), pages_to_read=pages)


def test_unknown_backend_is_refused():
    with pytest.raises(UnsupportedBackendError, match="backend must be one of"):
        call(backend="cudnn")


def test_layout_needs_a_resolved_name():
    heads, sizes = Heads(2, 32), {"num_layers": 1, "num_pages": 3, "page_size": 16, "dtype": jnp.float32}
    with pytest.raises(ValueError, match="resolve it with select_backend first"):
        new_pages("auto", heads, **sizes)
    name = select_backend("auto", kind=heads, num_query_heads=4, page_size=16, kv_dtype=jnp.float32)
    pool = new_pages(name, heads, **sizes)
    assert pool.shape == (1, 3, 4, 16, 32)


@pytest.mark.parametrize("head_dim", [33, 136])
def test_int4_pool_of_other_heads_is_refused(head_dim):
    sizes = {"kind": Heads(2, head_dim), "num_query_heads": 4, "page_size": 16}
    with pytest.raises(UnsupportedBackendError, match=f"head_dim must be even, and above 128 .* not {head_dim}"):
        select_backend("xla", **sizes, kv_dtype="int4")


@pytest.mark.parametrize("dtype", ["int16", "float8_e5m2"])
def test_pool_of_another_dtype_is_refused(dtype):
    sizes = {"kind": Heads(2, 32), "num_query_heads": 4, "page_size": 16}
    with pytest.raises(UnsupportedBackendError, match=rf"the pool must hold floating point numbers .*, not {dtype}"):
        select_backend("xla", **sizes, kv_dtype=jnp.dtype(dtype))


@pytest.mark.usefixtures("without_jaxtyping")
def test_scales_come_with_the_dtypes_that_need_them():
    sizes = {"num_layers": 2, "num_pages": 9, "page_size": 16}
    quantized, plain = (new_pages("xla", Heads(2, 32), **sizes, dtype=dtype) for dtype in ("int8", "float32"))
    with pytest.raises(ValueError, match="got int8 without scales; use new_pages"):
        call(kv_pages=quantized.values)
    with pytest.raises(ValueError, match="got float32 with scales"):
        call(kv_pages=QuantizedPages(plain, quantized.scales))
    for scales in (quantized.scales[1:], quantized.scales.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"scales .* must have shape \(2, 9, 4, 16\) and be bfloat16, got"):
            call(kv_pages=quantized._replace(scales=scales))

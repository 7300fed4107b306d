"""TPU kernel: calls that it serves, block sizes for each chip, and page sizes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.pallas_kernel import TunedSizes, read_entries
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    Heads,
    default_page_size,
    mosaic_tpu,
    select_backend,
)
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.pallas_kernels.ragged_paged_attention.layout import PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import block_sizes, memory_tiles
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import PageMatrices
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, QuantizedPages
from tests.kernels.test_mosaic_tpu_kernel import CALLS, PROBLEM
from tuned_sizes import write_entries

SERVED = {"kind": Heads(8, 128), "num_query_heads": 32, "page_size": 16, "kv_dtype": "bfloat16"}


def test_serves_tpus():
    assert select_backend(platform="tpu", **SERVED) == "mosaic_tpu"
    assert "TPUs only" in mosaic_tpu.KERNEL.unsupported_reason(dataclasses.replace(PROBLEM, platform="cpu"))
    for kv_dtype in QUANTIZED_MAX:
        narrow = {**SERVED, "page_size": 32, "kv_dtype": kv_dtype}
        assert select_backend("mosaic_tpu", platform="tpu", **narrow) == "mosaic_tpu"
    with jax.sharding.use_abstract_mesh(TPU_V5E.mesh()):
        assert select_backend(**SERVED) == "mosaic_tpu"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_dtype": "float16"}, "float16"),
        ({"kind": Heads(8, 260)}, "head_dim must be"),
        ({"kind": Heads(8, 56)}, "from 64 to 512, not 56"),
        ({"kind": Heads(8, 520)}, "from 64 to 512, not 520"),
        ({"kind": Heads(8, 512), "page_size": 32, "kv_dtype": "int8"}, "which heads of 512 have apart"),
        ({"page_size": 8}, "from 16 to 256"),
        ({"kv_dtype": "int8"}, "from 32 to 256 in a pool of int8, not 16"),
        ({"kv_dtype": "float8_e4m3fn"}, "from 32 to 256 in a pool of float8_e4m3fn, not 16"),
        ({"page_size": 48}, "not 48"),
        ({"page_size": 512}, "not 512"),
        ({"page_size": 256, "kind": Heads(32, 128), "kv_dtype": "float32"}, "at most 3145728 bytes, not 8388608"),
    ],
)
def test_refuses_with_a_reason_on_tpu(changed, reason):
    sizes = {**SERVED, **changed}
    problem = Problem(**sizes | {"kv_dtype": jnp.dtype(sizes["kv_dtype"])}, platform="tpu")
    assert reason in BACKENDS["mosaic_tpu"].unsupported_reason(problem)
    assert select_backend(platform="tpu", **sizes) == "xla"


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 20])
def test_scales_keep_their_places_in_other_layouts(num_kv_heads):
    """Each scale belongs to one token and head; tiles are dense, except if heads are not a power of two."""
    shape = (2, 3, 64, 2 * num_kv_heads)
    bits = np.arange(np.prod(shape), dtype=np.uint16) + 0x80  # normal numbers alone: XLA may flush others to zero
    scales = jnp.asarray(bits.view("bfloat16").reshape(shape))
    pool = QuantizedPages(jnp.zeros((*shape, 16), jnp.int8), scales)
    layout = PageMatrices((2 * num_kv_heads, 16))
    stored = layout.from_canonical(pool)
    assert stored.scales.shape == layout.scale_shape(PoolDims(2, 3, 64))
    assert stored.scales.size <= 2 * max(scales.size, shape[0] * shape[1] * 2 * memory_tiles.LANES)
    np.testing.assert_array_equal(layout.to_canonical(stored).scales, scales)


def test_refuses_what_does_not_fit_a_chip():
    small, large = ((chip, {**SERVED, "page_size": 256}) for chip in (TPU_V4, TPU_V5E))
    for (chip, sizes), backend in ((small, "xla"), (large, "mosaic_tpu")):
        with jax.sharding.use_abstract_mesh(chip.mesh()):
            assert select_backend(**sizes) == backend
            assert select_backend(**SERVED) == "mosaic_tpu"


@pytest.mark.parametrize(
    ("vmem_bytes", "wanted"),
    [
        (2**24, block_sizes.BlockSizeLimits()),
        (2**25, block_sizes.BlockSizeLimits()),
        (
            2**25,
            block_sizes.BlockSizeLimits(
                work_item_bytes=2**23, decode_keys=3000, tile_keys=700, tile_rows=1024, slots=4
            ),
        ),
        (2**24, block_sizes.BlockSizeLimits(2**18, 100, 48, 100, 2)),
    ],
)
def test_blocks_fit_the_memory(vmem_bytes, wanted):
    """Blocks fit a quarter of the memory of any chip; one copy fetches a block's page ids."""
    for num_kv_heads, group, head_dim, page_size, dtype in itertools.product(
        (1, 3, 8, 32), (1, 4, 8), (64, 128, 256, 512), (16, 32, 256), ("bfloat16", "float32", "int8")
    ):
        problem = Problem(Heads(num_kv_heads, head_dim), num_kv_heads * group, page_size, jnp.dtype(dtype), "tpu")
        if num_kv_heads * group * head_dim > 64 * 128 or mosaic_tpu.KERNEL.unsupported_reason(problem) is not None:
            continue
        sizes = {"num_kv_heads": num_kv_heads, "group": group, "page_size": page_size}
        sizes["columns"] = memory_tiles.pair_columns(head_dim)
        config = dataclasses.replace(CALLS[0], **sizes, kv_dtype=jnp.dtype(dtype), vmem_bytes=vmem_bytes, sizes=wanted)
        blocks = block_sizes.choose_block_sizes(config)
        taken = [block_sizes._decode_bytes, block_sizes._tile_bytes, block_sizes._write_bytes]
        assert max(count(config, blocks) for count in taken) <= vmem_bytes
        assert block_sizes.PAGE_IDS % blocks.decode_pages == block_sizes.PAGE_IDS % blocks.tile_pages == 0
        assert all(tokens % memory_tiles.ALIGNED_TOKENS == 0 for tokens in blocks.tile_tokens)


def test_what_does_not_fit_the_memory_is_told():
    config = dataclasses.replace(CALLS[0], num_kv_heads=128, group=16, columns=memory_tiles.pair_columns(256))
    with pytest.raises(ValueError, match="128 kv heads of 256 with 16 query heads each do not fit the 16777216 bytes"):
        block_sizes.choose_block_sizes(config)


@pytest.mark.parametrize("chip", [TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, TPU7X], ids=lambda chip: chip.topology_name)
def test_units_are_what_memory_moves_meanwhile(chip):
    """A work item is what memory moves while the next copies are issued, as far as memory holds it."""
    with jax.sharding.use_abstract_mesh(chip.mesh()):
        sizes, facts = mosaic_tpu.KERNEL.sizes(PROBLEM), tpu.facts()
        moved = block_sizes.FETCH_S * facts.num_cores * facts.mem_bw_bytes_per_second
        assert sizes.work_item_bytes <= moved
        assert sizes.work_item_bytes > moved / 2 or 8 * sizes.work_item_bytes > facts.vmem_capacity_bytes // 4
        assert (
            dataclasses.replace(sizes, work_item_bytes=block_sizes.BlockSizeLimits().work_item_bytes)
            == block_sizes.BlockSizeLimits()
        )


def test_what_was_measured_to_be_best_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(mosaic_tpu.KERNEL.settings, "folder", tmp_path)
    shape = mosaic_tpu.shape_class(PROBLEM)
    with jax.sharding.use_abstract_mesh(TPU_V6E.mesh()):
        untuned = mosaic_tpu.KERNEL.sizes(PROBLEM)
        for decode_keys in (512, 2048):  # measuring again replaces the old entry
            write_entries(tmp_path / "v6e.json", [TunedSizes(shape, {"decode_keys": decode_keys}, {"us": 3.0})])
            assert mosaic_tpu.KERNEL.sizes(PROBLEM) == dataclasses.replace(untuned, decode_keys=decode_keys)
        with mosaic_tpu.KERNEL.settings.sized(slots=2):
            assert mosaic_tpu.KERNEL.sizes(PROBLEM) == dataclasses.replace(untuned, slots=2)
        other = dataclasses.replace(PROBLEM, page_size=2 * PROBLEM.page_size)
        assert mosaic_tpu.KERNEL.sizes(other) == untuned
        for wrong, reason in (({"slots": 1}, r"at least 2, got \{'slots': 1\}"), ({"pages": 4}, r"called \['pages'\]")):
            write_entries(tmp_path / "v6e.json", [TunedSizes(shape, wrong, {})])
            with pytest.raises(ValueError, match=reason):
                mosaic_tpu.KERNEL.sizes(PROBLEM)
    with jax.sharding.use_abstract_mesh(TPU_V5E.mesh()):
        assert mosaic_tpu.KERNEL.sizes(PROBLEM).decode_keys == untuned.decode_keys
    assert len(read_entries(tmp_path / "v6e.json")) == 1


def test_a_file_of_sizes_that_is_none_is_told(tmp_path):
    (tmp_path / "v6e.json").write_text('{"entries": [{"shape": {}}]}')
    with pytest.raises(ValueError, match=r"v6e\.json must hold entries of shape, sizes and evidence"):
        read_entries(tmp_path / "v6e.json")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (1, 128), (3, 96), (8, 128), (32, 256)])
def test_pages_are_worth_a_copy_of_their_own(num_kv_heads, head_dim, kv_dtype):
    """The kernel takes such pages, whatever the pool holds; pages of other backends stay small."""
    sizes = {"kind": Heads(num_kv_heads, head_dim), "kv_dtype": jnp.dtype(kv_dtype)}
    unchosen = {"num_query_heads": num_kv_heads, "page_size": None, **sizes}
    assert select_backend(**unchosen, platform="tpu") == "mosaic_tpu"
    page_size = default_page_size("mosaic_tpu", **sizes)
    page_bytes = page_size * memory_tiles.token_bytes(num_kv_heads, 2 * head_dim, jnp.dtype(kv_dtype))
    assert 2 * page_bytes > memory_tiles.COPY_BYTES or page_size == memory_tiles.COPY_TOKENS
    assert page_bytes <= memory_tiles.COPY_BYTES or page_size == max(16, 32 // jnp.dtype(kv_dtype).itemsize)
    assert {default_page_size(name, **sizes) for name in BACKENDS if name != "mosaic_tpu"} == {16}


def test_pages_are_those_of_the_backend_that_serves():
    """XLA's page size is the default on TPUs where the kernel cannot run."""
    sizes = {"kind": Heads(1, 32), "num_query_heads": 8, "kv_dtype": "bfloat16"}
    assert select_backend(page_size=None, **sizes, platform="tpu") == "xla"
    with pytest.raises(UnsupportedBackendError, match="from 64 to 512, not 32"):
        select_backend("mosaic_tpu", page_size=None, **sizes, platform="tpu")

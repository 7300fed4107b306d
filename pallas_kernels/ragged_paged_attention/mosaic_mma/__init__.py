"""Ragged paged attention for NVIDIA GPUs from Ampere on, in Pallas (Mosaic GPU), by warp-level matrix instructions.

It serves GPUs that the Hopper kernel (`mosaic_gpu`) does not: A100, L4, L40S, RTX 4090, RTX 5090, RTX PRO 6000, B200.
Tiles, work plan, softmax and merge are shared with `mosaic_gpu`. One warpgroup per thread block both copies and
computes: each warp has 16 rows in a tile with 64, loads keys and values from shared memory to registers (ldmatrix), and
multiplies them there (mma). While a block is computed, copies of the next ones are on their way, by cp.async (Ampere,
Ada) or TMA (Blackwell), to a ring with two to four blocks.
"""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels import warp_mma
from jaxserve.pallas_kernels.pallas_kernel import Settings
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import HALF_DTYPES, MANY_TOKENS, MosaicGpu
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_mma.tiling import MmaConfig

HEAD_DIMS = (32, 64, 96, 128, 256)
MAX_GROUP = 8  # a tile has eight tokens or more


class MosaicMma(MosaicGpu):
    """Attention backend for GPUs with warp-level matrix instructions."""

    module = f"{__name__}.kernel"

    @property
    def chips(self) -> Any:
        """Module with the properties of NVIDIA GPUs from Ampere on."""
        return warp_mma

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run a problem on any GPU: a pool dtype or a size; None if it can."""
        kind = problem.kind
        if isinstance(kind, Latents):
            return "it has no kernel for latents"
        if problem.kv_dtype.name not in HALF_DTYPES:
            return f"the pool must be one of {HALF_DTYPES}, not {problem.kv_dtype}"
        if kind.key_dim not in HEAD_DIMS:
            return f"head_dim must be one of {HEAD_DIMS}, not {kind.key_dim}"
        if problem.num_query_heads > MAX_GROUP * kind.num_kv_heads:
            return (
                f"a kv head serves at most {MAX_GROUP} query heads, not {problem.num_query_heads}/{kind.num_kv_heads}"
            )
        return self.unsupported_page_size(problem.page_size)

    def launch(self, problem: Problem) -> MmaConfig:
        """Return the kernels' static parameters for a large step without sinks, windows and draft trees."""
        kind, chip = problem.kind, self.target_chip()
        config = MmaConfig(
            num_tokens=MANY_TOKENS,
            num_kv_heads=kind.num_kv_heads,
            group=problem.num_query_heads // kind.num_kv_heads,
            key_dim=kind.key_dim,
            value_dim=kind.value_dim,
            page_size=problem.page_size,
            dtype=problem.kv_dtype,
            kv_dtype=problem.kv_dtype,
            options=AttentionOptions(1.0),
            has_sinks=False,
            has_tree=False,
            num_cores=chip.num_cores,
            interpret=self.settings.interpreter,
            shared_bytes=chip.memory_bytes,
            has_tma=warp_mma.has_tma(),
        )
        assert config.swizzle, "raises an error if no line of shared memory fits"
        return config


KERNEL = MosaicMma(Settings())

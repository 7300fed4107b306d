"""Static parameters and tile sizes for GPUs with warp-level matrix instructions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import (
    MAX_STAGES,
    MIN_TILE_TOKENS,
    KernelConfig,
    Tiling,
)

_BLOCK_SIZES = (64, 32, 16)  # tokens per key block
_SWIZZLES = (128, 64, 32)


@dataclass(frozen=True, kw_only=True)
class MmaConfig(KernelConfig):
    """Static parameters for the attention kernel and the merging kernel in one step.

    One warpgroup per thread block copies keys and values and computes, with 64 query rows per tile.
    """

    shared_bytes: int
    """Bytes of shared memory that a thread block can use."""
    has_tma: bool
    """True if copies to shared memory are by TMA and arrive at barriers, False if by cp.async."""

    @property
    def column_warpgroups(self) -> int:
        """One: a warpgroup computes all value columns."""
        return 1

    @property
    def is_wide(self) -> bool:
        """False: values have at most 256 columns."""
        return False

    @property
    def stores_rows(self) -> bool:
        """True: not all of these GPUs have TMA."""
        return True

    @property
    def padded_tokens(self) -> int:
        """Tokens in the arrays for queries and outputs: tiles begin at any eight, and cp.async checks no bounds."""
        return super().padded_tokens + self.tile_tokens

    @property
    def swizzle(self) -> int:
        """Bytes per line of shared memory; lines divide keys and values, and by cp.async every copy among four warps.

        Raises:
            ValueError: there is no such line.
        """
        row_tiles = min(self.page_size, self.block_kv, self.tile_tokens) // MIN_TILE_TOKENS
        for size in _SWIZZLES:
            column_tiles, left = divmod(2 * self.key_dim, size)
            if left == 0 and (self.has_tma or column_tiles % (4 // math.gcd(4, row_tiles)) == 0):
                return size
        raise ValueError(
            f"copies by cp.async of {8 * row_tiles} vectors with {self.key_dim} elements do not divide among four warps"
        )

    @property
    def tile_tokens(self) -> int:
        """Query tokens per tile, a power of two."""
        return 1 << int(math.log2(WARPGROUP_ROWS // self.group))

    @property
    def out_columns(self) -> int:
        """Columns per register array with sums, which are copied together to global memory."""
        return 64 if self.value_dim % 64 == 0 else 32

    @property
    def block_kv(self) -> int:
        """Tokens per key block, as many as fit twice."""
        return next(
            size for size in _BLOCK_SIZES if self._fixed_bytes + 2 * self._block_bytes(size) <= self.shared_bytes
        )

    @property
    def num_block_copies(self) -> int:
        """How many copies load a block's keys and values."""
        return 2 * max(1, self.block_kv // self.page_size)

    def tilings(self) -> list[Tiling]:
        """Return the only launch's tile sizes."""
        stages = (self.shared_bytes - self._fixed_bytes) // self._block_bytes(self.block_kv)
        return [
            Tiling(
                tokens=self.tile_tokens,
                row_warpgroups=1,
                column_warpgroups=1,
                workers=1,
                num_cores=self.num_cores,
                stages=min(stages, MAX_STAGES),
            )
        ]

    @property
    def _fixed_bytes(self) -> int:
        """Bytes for queries and outgoing outputs."""
        return 2 * WARPGROUP_ROWS * (self.key_dim + self.out_columns)

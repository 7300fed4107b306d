"""Copies of tokens from shared memory to the output in global memory, for both kernels."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import EIGHTS
from jaxserve.pallas_kernels.warpgroups import i32, load, store

_COLUMNS = EIGHTS.reduce(0)  # register layout for one row, which eight lanes hold


def commit(config: KernelConfig) -> None:
    """Let the following copies see what this warpgroup has written to shared memory."""
    if not config.stores_rows:
        plgpu.commit_smem()


def copy_tokens(
    config: KernelConfig,
    source: Ref,
    row: Scalar,
    target: Ref,
    token: Scalar,
    head: Scalar,
    column: Scalar,
    num_tokens: Scalar,
    size: int,
) -> None:
    """Start copies of `num_tokens` tokens' outputs for one query head from shared memory to global memory.

    By TMA, copies must have static sizes: there is one copy per power of two, and these add up to any number of tokens.

    Args:
        config: static parameters.
        source: outputs in shared memory, `[rows, columns]`, one row per token.
        row: first row to copy.
        target: the kernel's output in global memory, `[tokens, heads, value_dim]`.
        token: token in the output to which the first row is copied.
        head: query head.
        column: the columns' index among the output's groups with `columns` columns.
        num_tokens: number of tokens to copy.
        size: maximum of `num_tokens`, a power of two.
    """
    columns = pl.ds(column * source.shape[1], source.shape[1])
    if config.stores_rows:

        @pl.loop(0, num_tokens)
        def copy_row(i: Scalar) -> None:
            store(target.at[token + i, head, columns], load(source.at[row + i], _COLUMNS))

        return
    done = i32(0)
    while size:

        @pl.when((num_tokens & size) != 0)
        def copy(done: Scalar = done, size: int = size) -> None:
            tokens = target.at[pl.ds(token + done, size), head, columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(row + done, size)], tokens)

        done, size = done + (num_tokens & size), size // 2


def wait(config: KernelConfig) -> None:
    """Wait until this warpgroup may overwrite the shared memory that it has copied from."""
    if not config.stores_rows:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

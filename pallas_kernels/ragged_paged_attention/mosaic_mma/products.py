"""Matmuls by warp-level instructions (mma) on registers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu

from jaxserve.pallas_kernels.kernel_values import Ref, Registers

plgpu: Any = mosaic_gpu  # types differ between jax versions
MMA = plgpu.mma  # jax 0.11 and earlier lack it
SUMS = plgpu.Layout.MMA_ACC(jnp.bfloat16)  # register layout for float32 sums, whatever the operands' dtype


class Products:
    """Matmuls for one operand dtype.

    Args:
        dtype: dtype of the operands, bfloat16 or float16.
        interpret: parameters of the interpreter, which lacks these instructions; None to run on a GPU.
    """

    def __init__(self, dtype: jnp.dtype, interpret: Any) -> None:
        """Multiply matrices with this dtype."""
        self.lhs, self.rhs = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype)
        self.dtype, self.interpret = dtype, interpret

    def left(self, memory: Ref) -> Registers:
        """Load a left operand from shared memory, `[rows, inner]`."""
        return plgpu.load(memory, layout=self.lhs)

    def right(self, memory: Ref) -> Registers:
        """Load a right operand from shared memory, `[inner, columns]`."""
        return plgpu.load(memory, layout=self.rhs)

    def right_transposed(self, memory: Ref) -> Registers:
        """Load a right operand from shared memory with its transpose, `[columns, inner]`."""
        if self.interpret is not None:
            return plgpu.load(memory).T
        return plgpu.load(memory.transpose((1, 0)), layout=self.rhs)

    def add(self, sums: Registers, left: Registers, right: Registers) -> Registers:
        """Return `sums + left @ right`, in float32."""
        if self.interpret is not None:
            return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)
        return MMA(sums, left, right)

    def as_left(self, sums: Registers) -> Registers:
        """Convert sums to a left operand: each thread has the elements already that it needs."""
        rounded = sums.astype(self.dtype)
        if self.interpret is not None:
            return rounded
        lhs = self.lhs

        @plgpu.inline_mgpu(
            arg_types=(SUMS,), return_type=plgpu.ShapeDtypeStruct(rounded.shape, rounded.dtype, layout=lhs)
        )
        def relabel(_: Any, x: Any) -> Any:
            target = lhs.to_mgpu()
            registers = x.registers.reshape(target.registers_shape(x.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=x.is_signed)

        return relabel(rounded)

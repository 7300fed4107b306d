"""MatrixInputs: order, factors and quantisation of a matmul's inputs."""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxserve.layers.weight_formats import activations
from jaxserve.layers.weight_formats.activations import MeshAxes
from jaxserve.weights import Activation


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MatrixInputs:
    """Column order, factors and quantisation of a matmul's inputs; by default inputs stay as they are.

    Attributes:
        order: input index of each stored column, if the checkpoint's groups are not consecutive columns. Columns are
            sorted by group before they are sharded, so that a shard's inputs may lie on other devices.
        factor: factor on each input.
        scale: static activation scale.
        zero: static activation zero point.
        activation: quantisation of the inputs, or None.
    """

    order: Int[Array, "*stack in"] | None = None
    factor: Float32[Array, "*stack in"] | None = None
    scale: Float32[Array, "*stack"] | None = None
    zero: Float32[Array, "*stack"] | None = None
    activation: Activation | None = field(default=None, metadata={"static": True})

    @property
    def are_in_place(self) -> bool:
        """True if inputs are in the order of the stored columns, and have no factors."""
        return self.order is None and self.factor is None

    def arrange(self, x: Float[Array, "T in"], axis: MeshAxes | None) -> Float[Array, "T in"]:
        """Return x in column order and multiplied by the factors.

        Args:
            x: activations; with an axis, this device's columns.
            axis: mesh axes over which x's columns are sharded; None if they are not.
        """
        if self.order is not None:
            x = x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)
            x = x.at[:, self.order].get(mode="promise_in_bounds", unique_indices=True)
        return x if self.factor is None else (x * self.factor[None]).astype(x.dtype)

    def quantize(
        self, x: Float[Array, "T in"], axis: MeshAxes | None
    ) -> tuple[Float[Array, "T in"], Float32[Array, "T 1"] | None]:
        """Arrange and quantise x; return it with a factor for the outputs or None, see `activations.quantize`."""
        x = self.arrange(x, axis)
        if self.activation is None:
            return x, None
        return activations.quantize(x, self.activation, activations.Scales(self.scale, self.zero), axis)

    def restore(self, rows: Float[Array, "T in"]) -> Float[Array, "T in"]:
        """Return stored matrix rows with their columns in input order and multiplied by the factors."""
        if self.order is not None:
            rows = jnp.zeros_like(rows).at[:, self.order].set(rows)
        return rows if self.factor is None else rows * self.factor[None]


PLAIN_INPUTS = MatrixInputs()
"""Inputs that stay as they are."""

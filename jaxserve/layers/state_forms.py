"""States that recurrent layers keep for a sequence, with a size that does not depend on its length.

States lie in a pool: one entry for each slot, then entries for snapshots, from which later sequences with the same
prefix resume. A recurrent layer's form is the mixer of its `LayerSpec`.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int


class StateRows(NamedTuple):
    """Rows of a step, one after the other on the token axis, and the pool entries for their states.

    Attributes:
        source: entry from which each row's state is read; not read if `start` is 0, as a sequence starts from zeros.
        target: entry to which the new state is written, if the row has tokens.
        start: number of tokens in the sequence before the row.
        cu_q_lens: each row's first token, then the end of the last row.
        row: each token's row; arbitrary for padding.
        offset: each token's index in its row; arbitrary for padding.
        kept_len: number of the row's tokens after which its state is also written to `kept`; 0 for no snapshot.
        kept: entry for that snapshot, which no row in the step reads; arbitrary without a snapshot.
    """

    source: Int[Array, " R"]
    target: Int[Array, " R"]
    start: Int[Array, " R"]
    cu_q_lens: Int[Array, " R1"]
    row: Int[Array, " T"]
    offset: Int[Array, " T"]
    kept_len: Int[Array, " R"]
    kept: Int[Array, " R"]

    @property
    def q_lens(self) -> Int[Array, " R"]:
        """Number of tokens in each row."""
        return self.cu_q_lens[1:] - self.cu_q_lens[:-1]


def read_entries(
    pool: Float32[Array, "L N *D"], layer: Int[Array, ""], source: Int[Array, " R"], start: Int[Array, " R"]
) -> Float32[Array, "R *D"]:
    """Return one layer's states from which the rows continue: zeros for rows that start a sequence.

    Args:
        pool: states by layer and entry.
        layer: index among the recurrent layers.
        source: entry of each row.
        start: number of tokens in the sequence before each row.
    """

    def read() -> Float32[Array, "R *D"]:
        """Return the source entries."""
        return pool.at[layer, source].get(mode="clip")

    if start.shape == (1,):  # a branch, as XLA:CPU would fuse the read of a single row into its later uses
        return lax.cond(start[0] == 0, lambda: jnp.zeros((1, *pool.shape[2:]), pool.dtype), read)
    return jnp.where(start.reshape(-1, *[1] * (pool.ndim - 2)) == 0, 0.0, read())


@runtime_checkable
class StateForm(Protocol):
    """A layer's state on a device: its sizes and how tokens update it; hashable."""

    @property
    def token_flops(self) -> int:
        """Floating-point operations by which a token updates and reads one layer's state."""

    def local(self, num_devices: int) -> "StateForm":
        """Return the form on one device among `num_devices`; ConfigError if they cannot divide it."""

    def times(self, factor: int) -> "StateForm":
        """Return the form with `factor` times as many heads."""

    def new(self, num_layers: int, num_entries: int) -> Any:
        """Return a zeroed pool: a tree of arrays whose first dimensions are layers and entries."""

    def advance(self, inputs: Any, rows: StateRows, pool: Any, layer: Int[Array, ""]) -> tuple[Array, Any]:
        """Compute a step's tokens in one layer; return their outputs [T, heads, size] and the updated pool.

        Args:
            inputs: inputs for the tokens; the form defines their type.
            rows: the step's rows.
            pool: a device's pool.
            layer: index among the recurrent layers.
        """

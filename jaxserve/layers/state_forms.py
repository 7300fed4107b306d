"""Forms of the state that layers without attention keep of a sequence, whatever its length.

States lie in a pool of entries: one for each slot, then those of snapshots, from which later sequences go on that begin
alike. A recurrent layer's form is the mixer of its `LayerSpec`.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int


class StateRows(NamedTuple):
    """Rows of a step, one behind the other on the token axis, and the entries of their states.

    Attributes:
        source: entry that each row's state is read from; not read where `start` is 0: a sequence starts from zeros.
        target: entry that it is written to, if the row has tokens.
        start: tokens computed before.
        cu_q_lens: first token of each row, and the end of the last.
        row: row of each token; any for padding.
        offset: place of each token in its row; any for padding.
        kept_len: tokens of each row after which its state is written to `kept` too; 0 for none.
        kept: entry of that snapshot, which no row of the step reads; any where there is none.
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
        """Tokens of each row."""
        return self.cu_q_lens[1:] - self.cu_q_lens[:-1]


def read_entries(
    pool: Float32[Array, "L N *D"], layer: Int[Array, ""], source: Int[Array, " R"], start: Int[Array, " R"]
) -> Float32[Array, "R *D"]:
    """Return what rows go on from in one layer: their entries, or zeros for those that start a sequence."""

    def read() -> Float32[Array, "R *D"]:
        return pool.at[layer, source].get(mode="clip")

    if start.shape == (1,):  # a branch, as XLA:CPU would fuse the reading of one row with what needs it later
        return lax.cond(start[0] == 0, lambda: jnp.zeros((1, *pool.shape[2:]), pool.dtype), read)
    return jnp.where(start.reshape(-1, *[1] * (pool.ndim - 2)) == 0, 0.0, read())


@runtime_checkable
class StateForm(Protocol):
    """Form of a layer's state on a device; hashable."""

    @property
    def token_flops(self) -> int:
        """Floating-point operations by which a token changes and reads the state of a layer."""

    def local(self, num_devices: int) -> "StateForm":
        """Return the form on one of `num_devices`; ConfigError if they cannot share it."""

    def times(self, factor: int) -> "StateForm":
        """Return the form with heads multiplied by `factor`."""

    def new(self, num_layers: int, num_entries: int) -> Any:
        """Return a pool of zeros: a tree of arrays with layers and entries as their first dimensions."""

    def advance(self, inputs: Any, rows: StateRows, pool: Any, layer: Int[Array, ""]) -> tuple[Array, Any]:
        """Compute the tokens of a step in one layer; return their outputs [T, heads, size] and the pool.

        Args:
            inputs: inputs of the tokens, as the form defines them.
            rows: rows of the step.
            pool: pool of a device.
            layer: number of the layer among those with a state.
        """

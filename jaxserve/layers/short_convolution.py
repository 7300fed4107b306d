"""Short causal convolution per channel over a sequence's last tokens; their inputs are part of the recurrent state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxserve.layers.state_forms import StateRows, read_entries


def convolve(
    x: Float32[Array, "T C"],
    taps: Float[Array, "C 1 width"],
    bias: Float[Array, " C"] | None,
    rows: StateRows,
    pool: Float32[Array, "L N past C"],
    layer: Int[Array, ""],
) -> tuple[Float32[Array, "T C"], Float32[Array, "L N past C"]]:
    """Return SiLU of each channel's convolution, and the pool with the rows' new windows."""
    weights, (T, C), past = taps[:, 0].T.astype(jnp.float32), x.shape, pool.shape[2]
    y = x * weights[past][None]
    if bias is not None:
        y += bias.astype(jnp.float32)[None]
    if not past:
        return jax.nn.silu(y), pool
    before = read_entries(pool, layer, rows.source, rows.start)
    by_row = before.reshape(-1, C)  # `past` tokens per row
    for distance in range(1, past + 1):
        place = jnp.clip(past + rows.offset - distance, 0, past - 1)
        earlier = by_row.at[rows.row * past + place].get(mode="clip")
        in_step = jnp.pad(x, ((distance, 0), (0, 0)))[:T]
        y += jnp.where((rows.offset >= distance)[:, None], in_step, earlier) * weights[past - distance][None]

    def window(num_tokens: Int[Array, " R"]) -> Float32[Array, "R past C"]:
        """Return each row's last `past` tokens after `num_tokens` more are computed."""
        place = num_tokens[:, None] - past + jnp.arange(past)[None, :]
        own = x.at[rows.cu_q_lens[:-1, None] + place].get(mode="clip")
        old = jnp.take_along_axis(before, jnp.clip(past + place, 0, past - 1)[:, :, None], axis=1)
        return jnp.where((place >= 0)[:, :, None], own, old)

    entry, num_tokens = (jnp.concatenate(x) for x in ((rows.target, rows.kept), (rows.q_lens, rows.kept_len)))
    entry = jnp.where(num_tokens > 0, entry, pool.shape[1])  # out of range, dropped
    windows = jnp.concatenate([window(rows.q_lens), window(rows.kept_len)])
    return jax.nn.silu(y), pool.at[layer, entry].set(windows, mode="drop")

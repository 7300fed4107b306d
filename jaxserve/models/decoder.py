"""Decoder around the blocks: embedding, unrolled or scanned layers, final norm, logits.

On CPU and GPU the layers are a list, unrolled, with the block as an inner jit; on TPU they are stacked and scanned.
The KV pool and other state of attention are passed through `carry`, so both forms update one stacked pool in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import embed, linear
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rope_table
from jaxserve.models.arch import ArchConfig
from jaxserve.models.llama import block
from jaxserve.models.params import Params

# attend(q[T,Q,H], k[T,K,H], v[T,K,H], rope[2,T,H/2], carry, layer, window) -> (out[T,Q,H], carry); it applies RoPE
# to q and k first. It must be hashable and close over no arrays.
Attend = Callable[[Array, Array, Array, Array, Any, Any, int | None], tuple[Array, Any]]

_inner_block = jax.jit(block, static_argnames=("arch", "window", "attend"))


def forward(
    params: Params,
    arch: ArchConfig,
    token_ids: Int[Array, " T"],
    positions: Int[Array, " T"],
    attend: Attend,
    carry: Any,
) -> tuple[Float[Array, "T D"], Any]:
    """Return the hidden states of every token after the final norm, and the updated carry.

    If the model is split over devices, `params`, `arch` and `carry` are one device's; the hidden states are whole.
    """
    with jax.named_scope("embed"):
        # The dtype is that of the norms, which are never quantised.
        x = embed(params["embed"], token_ids, params["final_norm"].dtype, axis=arch.tensor_axis)
        rope = rope_table(positions, arch.rope, arch.head_dim)
    layers = params["layers"]
    if isinstance(layers, list):
        for layer, p in enumerate(layers):
            x, carry = _inner_block(
                p, x, rope, carry, jnp.int32(layer), arch=arch, window=arch.windows[layer], attend=attend
            )
    else:
        x, carry = _scan_layers(layers, arch, x, rope, attend, carry)
    return rms_norm(x, params["final_norm"], arch.norm_eps), carry


def can_scan(arch: ArchConfig) -> bool:
    """Return whether all layers run the same program, so that they can be stacked and scanned."""
    return len(set(arch.windows)) == 1


def _scan_layers(
    layers: Params, arch: ArchConfig, x: Array, rope: Array, attend: Attend, carry: Any
) -> tuple[Array, Any]:
    run = partial(block, arch=arch, window=arch.windows[0], attend=attend)

    def body(state: tuple[Array, Any], xs: tuple[Params, Array]) -> tuple[tuple[Array, Any], None]:
        x, carry = state
        p, layer = xs
        return run(p, x, rope, carry, layer), None

    (x, carry), _ = lax.scan(body, (x, carry), (layers, jnp.arange(arch.num_layers)))
    return x, carry


def compute_logits(params: Params, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Return next-token logits in float32; of the device's part of the vocabulary if that is split."""
    with jax.named_scope("logits"):
        head = params["lm_head"] if "lm_head" in params else params["embed"]
        return linear(head, hidden, dtype=jnp.float32)

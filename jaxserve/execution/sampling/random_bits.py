"""Random bits per row from its seed and position: threefry2x32 (Salmon et al. 2011), unrolled.

jax.random derives a key with one function per word and uses loops over rounds on CPUs: some 30 kernels, a fifth of a
step's compile time. Unrolled, the rounds are one kernel.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Apply 20 rounds of threefry2x32, u32 throughout; keys and counters broadcast."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(distance)) | (y >> jnp.uint32(32 - distance))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


# Streams of independent draws at the same position
TARGET, DRAFT, RESIDUAL, ACCEPT = range(4)


def uniform_noise(
    seed: UInt32[Array, "R 2"],
    position: Int[Array, " R"],
    base_seed: UInt32[Array, ""],
    num_draws: int,
    stream: UInt32[Array, " R"] | int = TARGET,
) -> Float[Array, "R N"]:
    """Return uniform noise f32[R, num_draws] in (0, 1), a function of base seed and each row's seed and position.

    Args:
        seed: low and high words of each row's seed.
        position: position of the token to draw.
        base_seed: engine seed.
        num_draws: draws per row, N.
        stream: stream per row, or for all; different streams are independent.
    """
    position = lax.bitcast_convert_type(position, jnp.uint32)
    row_key = threefry2x32((seed[:, 0], seed[:, 1]), (position, jnp.broadcast_to(base_seed, position.shape)))
    half = -(-num_draws // 2)
    index = lax.broadcasted_iota(jnp.uint32, (position.shape[0], half), 1)
    streams = (
        jnp.full_like(index, stream) if isinstance(stream, int) else jnp.broadcast_to(stream[:, None], index.shape)
    )
    first, second = threefry2x32((row_key[0][:, None], row_key[1][:, None]), (index, streams))
    bits = jnp.concatenate([first, second], axis=1)[:, :num_draws]
    # 23 random bits plus a half: exact in float32, and neither 0 nor 1.
    return ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def gumbel_noise(
    seed: UInt32[Array, "R 2"],
    position: Int[Array, " R"],
    base_seed: UInt32[Array, ""],
    num_draws: int,
    stream: UInt32[Array, " R"] | int = TARGET,
) -> Float[Array, "R N"]:
    """Return standard Gumbel noise f32[R, num_draws]; see `uniform_noise` for the arguments."""
    return -jnp.log(-jnp.log(uniform_noise(seed, position, base_seed, num_draws, stream)))

"""Tensors of a module by their roles, as several tools name them; and the refusal of a scheme."""

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.scheme import Role

PLAIN_SCALED: tuple[tuple[Role, str], ...] = (("elements", "weight"), ("scale", "weight_scale"))
PACKED_SCALED: tuple[tuple[Role, str], ...] = (("elements", "weight_packed"), ("scale", "weight_scale"))
INPUT: tuple[tuple[Role, str], ...] = (("input_scale", "input_scale"),)
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


def refusal(what: str, got: object, where: str) -> CheckpointError:
    """Return the error for a scheme that is not supported, of the modules `where`."""
    return CheckpointError(f"{what}, got {got} for {where}; quantise those modules otherwise")

"""Names that several tools give to a module's tensors, and the error for unsupported schemes."""

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.scheme import Suffixes

PLAIN_SCALED: Suffixes = (("elements", "weight"), ("scale", "weight_scale"))
PACKED_SCALED: Suffixes = (("elements", "weight_packed"), ("scale", "weight_scale"))
INPUT: Suffixes = (("input_scale", "input_scale"),)
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


def refusal(what: str, got: object, where: str) -> CheckpointError:
    """Return the error for an unsupported scheme in the modules `where`."""
    return CheckpointError(f"{what}, got {got} for {where}; quantise those modules otherwise")

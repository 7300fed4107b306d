"""Weight formats: how devices store matrices, by their `quantization` names."""

from importlib import import_module

from jaxserve.api.config import WEIGHT_FORMATS
from jaxserve.layers.weight_formats.stored import StoredFormat
from jaxserve.layers.weight_formats.weight_format import FormatChoice
from jaxserve.weights.quantized import Schemes


def weight_format(
    name: str | None, schemes: Schemes | None = None, activation_quantization: str | None = None
) -> FormatChoice:
    """Return the format that `quantization` calls `name`; without a name, a quantised checkpoint's own format.

    Args:
        name: value for `quantization`; with a name, a quantised checkpoint is dequantised and quantised again.
        schemes: a quantised checkpoint's schemes.
        activation_quantization: "int8" to round the inputs of matmuls with integers, see `EngineConfig`.
    """
    found: FormatChoice
    if name is None and schemes is not None:
        found = StoredFormat(schemes)
    else:
        found = import_module(WEIGHT_FORMATS[name]).FORMAT
    return found if activation_quantization is None else found.rounding_inputs()

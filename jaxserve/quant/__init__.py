"""Weight formats: the storage of matrices on devices, by the name that `quantization` takes."""

from importlib import import_module

from jaxserve.config import WEIGHT_FORMATS
from jaxserve.quant.weight_format import WeightFormat


def weight_format(name: str | None) -> WeightFormat:
    """Return the format that `quantization` calls `name`."""
    found: WeightFormat = import_module(WEIGHT_FORMATS[name]).FORMAT
    return found

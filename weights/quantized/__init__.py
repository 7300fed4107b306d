"""Quantised checkpoints of other tools: their schemes, and their tensors as parts that a device takes slices of."""

from jaxserve.weights.quantized.config import read_schemes
from jaxserve.weights.quantized.part import QuantizedPart, quantized_view
from jaxserve.weights.quantized.scheme import Activation, Scheme, Schemes

__all__ = ["Activation", "QuantizedPart", "Scheme", "Schemes", "quantized_view", "read_schemes"]

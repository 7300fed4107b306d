"""Weights in fewer bits than activations."""

from jaxserve.quant.int8 import QuantizedMatrix, multiply, quantize

__all__ = ["QuantizedMatrix", "multiply", "quantize"]

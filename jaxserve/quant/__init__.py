"""Weights in fewer bits than activations."""

from jaxserve.quant.int8 import QuantizedMatrix, block_size, multiply, quantize

__all__ = ["QuantizedMatrix", "block_size", "multiply", "quantize"]

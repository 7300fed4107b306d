"""Quantisation of weights."""

from jaxserve.quant.int8 import QuantizedMatrix, block_size, multiply, quantize

__all__ = ["QuantizedMatrix", "block_size", "multiply", "quantize"]

"""Matmul kernels for TPUs, in Pallas (Mosaic).

`float_kernel.py` multiplies groups of rows with float matrices, `quantized_kernel.py` all rows with a quantised matrix.
"""

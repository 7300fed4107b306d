"""Matmul kernels for TPUs, in Pallas (Mosaic).

`float_kernel.py` multiplies each group by a float matrix, `quantized_kernel.py` all rows by a quantised matrix.
"""

"""Matmul kernels for Hopper GPUs, in Pallas (Mosaic GPU).

`float_kernel.py` multiplies groups of rows with float matrices, `quantized_kernel.py` all rows with a quantised matrix.
`pipeline.py` is common to both: persistent thread blocks with a ring of shared memory.
"""

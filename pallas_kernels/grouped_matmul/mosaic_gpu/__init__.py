"""Matmul kernels for Hopper GPUs, in Pallas (Mosaic GPU).

`float_kernel.py` multiplies each group by a float matrix, `quantized_kernel.py` all rows by a quantised matrix.
`pipeline.py` is common to both: persistent thread blocks with a shared-memory ring.
"""

"""Checkpoints: the only code that knows file formats. Callers describe the tensors by rows (see `TensorRow`).

Orbax lives in `weights.orbax_store`, imported only by those who use it: it is slow to import.
"""

from weights.dummy import dummy
from weights.errors import CheckpointError
from weights.rows import TensorRow
from weights.safetensors_store import load, read_config, read_generation_config, save
from weights.stored_tensor import StoredTensor, host_buffer

__all__ = [
    "CheckpointError",
    "StoredTensor",
    "TensorRow",
    "dummy",
    "host_buffer",
    "load",
    "read_config",
    "read_generation_config",
    "save",
]

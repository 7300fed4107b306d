"""Checkpoints: the only code that knows file formats. Callers describe the tensors by rows (see `TensorRow`).

Orbax is imported only where something is written with it: it is slow to import.
"""

from weights.convert import convert
from weights.dummy import dummy
from weights.errors import CheckpointError
from weights.load import assemble, check, load
from weights.rows import TensorRow
from weights.safetensors_store import read_config, read_generation_config
from weights.save import save, save_orbax
from weights.stored_tensor import StoredTensor, host_buffer

__all__ = [
    "CheckpointError",
    "StoredTensor",
    "TensorRow",
    "assemble",
    "check",
    "convert",
    "dummy",
    "host_buffer",
    "load",
    "read_config",
    "read_generation_config",
    "save",
    "save_orbax",
]

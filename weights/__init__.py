"""Checkpoints: the only code that knows file formats. Callers describe each tensor by a row (see `TensorRow`).

Orbax is imported only to write Orbax checkpoints, because its import is slow.
"""

from jaxserve.weights.convert import convert, derive
from jaxserve.weights.digest import content_digest, file_stamps
from jaxserve.weights.dummy import dummy
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.load import OpenCheckpoint, assemble, check, draft_layers, load, open_checkpoint
from jaxserve.weights.quantized import Activation, QuantizedPart, Scheme, Schemes, read_schemes
from jaxserve.weights.rows import TensorRow
from jaxserve.weights.safetensors_store import read_generation_config
from jaxserve.weights.save import save, save_orbax
from jaxserve.weights.sentence_transformers import EmbeddingModules, read_embedding_modules
from jaxserve.weights.stored_tensor import StoredTensor, host_buffer
from jaxserve.weights.stores import has_config, read_config
from jaxserve.weights.torch_tensors import from_torch

__all__ = [
    "Activation",
    "CheckpointError",
    "EmbeddingModules",
    "OpenCheckpoint",
    "QuantizedPart",
    "Scheme",
    "Schemes",
    "StoredTensor",
    "TensorRow",
    "assemble",
    "check",
    "content_digest",
    "convert",
    "derive",
    "draft_layers",
    "dummy",
    "file_stamps",
    "from_torch",
    "has_config",
    "host_buffer",
    "load",
    "open_checkpoint",
    "read_config",
    "read_embedding_modules",
    "read_generation_config",
    "read_schemes",
    "save",
    "save_orbax",
]

"""One form of checkpoint directory from the other: Hugging Face's safetensors, or Orbax."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory

from weights import orbax_store, safetensors_store
from weights.errors import CheckpointError
from weights.load import is_orbax, open_tensors
from weights.progress import progress_bar
from weights.rows import TensorRow

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TEMPLATES = "additional_chat_templates"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    specs: Sequence[TensorRow],
    *,
    use_tqdm: bool = False,
) -> None:
    """Write the checkpoint in `source` to `target`: as Orbax where it is safetensors, as safetensors where it is Orbax.

    Every tensor keeps its name, its dtype and its bits. All other files of the model are copied, so that `target`
    serves by itself. It appears when it is whole.

    Args:
        source: a checkpoint directory of either form.
        target: a directory that is absent or empty.
        specs: one row per tensor of the model.
        use_tqdm: show progress in bytes where stderr is a terminal.

    Raises:
        CheckpointError: as `load`; `target` is taken, or inside `source`.
        OSError: it cannot be written.
    """
    source, target = FilePath(source), FilePath(target).absolute()
    _require_free(target, source)
    tensors = open_tensors(source, specs)
    store = safetensors_store if is_orbax(source) else orbax_store
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=".converting-", dir=target.parent) as temporary,
        progress_bar(sum(tensor.nbytes for tensor in tensors.values()), "Converting", use_tqdm) as bar,
    ):
        scratch = FilePath(temporary) / target.name
        scratch.mkdir()
        _copy_others(source, scratch)
        store.write_tensors(scratch, tensors, bar.update)
        if target.exists():
            target.rmdir()
        scratch.rename(target)


def _require_free(target: FilePath, source: FilePath) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} must be absent or an empty directory, got something there; remove it first")
    if source.absolute().resolve() in target.resolve().parents:
        raise CheckpointError(f"{target} must not be inside {source}; choose another place")


def _copy_others(source: FilePath, target: FilePath) -> None:
    """All files but weights, of any form, and hidden ones."""
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES)

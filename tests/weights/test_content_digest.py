"""The digest of a checkpoint's content."""

import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.weights import safetensors_store

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones((40, 3), np.float16),
    "c": np.float32(2).reshape(()),
    "d": np.zeros((0, 4), np.float32),
}


def digest(path, tensors, **options):
    path.mkdir()
    safetensors_store.write_tensors(path, tensors, **options)
    return weights.content_digest(path)


def test_files_do_not_matter_and_order_does_not(tmp_path):
    expected = digest(tmp_path / "one", TENSORS)
    assert digest(tmp_path / "shards", dict(reversed(TENSORS.items())), max_shard_bytes=100) == expected
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"].reshape(3, 2)},
        {"a": TENSORS["a"].view(np.int32)},
        {"b": np.concatenate([np.ones((39, 3)), np.ones((1, 3)) * 1.001]).astype(np.float16)},
        {"e": np.zeros(1, np.float32)},
    ],
)
def test_every_tensor_matters(tmp_path, change):
    assert digest(tmp_path / "old", TENSORS) != digest(tmp_path / "new", TENSORS | change)


def test_tensors_are_read_in_slabs(tmp_path, monkeypatch):
    expected = digest(tmp_path / "whole", TENSORS)
    monkeypatch.setattr("jaxserve.weights.digest._SLAB_BYTES", 7)
    assert weights.content_digest(tmp_path / "whole") == expected


def test_a_replaced_file_has_another_stamp(tmp_path):
    digest(tmp_path / "old", {"a": jnp.ones(3)})
    before = weights.file_stamps(tmp_path / "old")
    assert weights.file_stamps(tmp_path / "old") == before
    file = tmp_path / "old" / "model.safetensors"
    shutil.copy2(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    assert weights.file_stamps(tmp_path / "old") != before

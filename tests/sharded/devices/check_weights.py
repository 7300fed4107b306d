"""Each device's share of the weights: heads, feed-forward and vocabulary of its part of the model."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Semaphore
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jaxserve import weights
from jaxserve.layers.sharding import named_sharding, tensor_mesh
from jaxserve.layers.weight_formats import fp8 as float8
from jaxserve.layers.weight_formats import weight_format
from jaxserve.layers.weight_formats.int8 import block_size, quantize
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import ParamSpec, device_bytes, matrix_transform, split_array, unsplit
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights import orbax_store, stored_tensor
from jaxserve.weights.load import open_checkpoint
from jaxserve.weights.rows import leaf_at
from tests.parameters import mainly

SEED = 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "intermediate_size": 768,
    "attention_bias": True,
    "mlp_bias": True,
}
GPT2 = {  # matrices are stored transposed, and q, k and v as one
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 131,
    "n_embd": 768,
    "n_inner": 768,
    "n_layer": 1,
    "n_head": 12,
    "n_positions": 32,
    "tie_word_embeddings": False,
}
FORMS: dict[str, dict[str, Any]] = {"float": {}, "int8": {"form": weight_format("int8")}}
if packed_linear.unsupported("float32", "cpu") is None:
    FORMS |= {f"packed {name}": {**form, "native": True} for name, form in FORMS.items()}
FORMS["fp8"] = {"form": weight_format("fp8")}
CONFIGS_AND_FORMS = pytest.mark.parametrize(
    ("config", "form"),
    [
        *(pytest.param(CONFIG, form, id=f"llama-{form}") for form in FORMS),
        pytest.param(GPT2, "float", id="gpt2-float"),
        *(pytest.param(GPT2, form, id=f"gpt2-{form}", marks=pytest.mark.full) for form in FORMS if form != "float"),
    ],
)


_written: dict[str, Path] = {}  # keys: configurations


def build(path: Path, config: dict[str, Any] = CONFIG, **overrides: Any) -> tuple[ArchConfig, list[ParamSpec]]:
    """Write a checkpoint of random weights to `path`; those that many checks have are made once, and linked."""
    config = {**config, **overrides}
    arch = registry.from_hf_config(config)
    specs = registry.param_specs(arch)
    if (first := _written.setdefault(json.dumps(config), path)) is path:
        weights.save(path, specs, weights.dummy(specs, SEED, jnp.float32), config)
    else:
        shutil.copytree(first, path, copy_function=os.link, dirs_exist_ok=True)
    return arch, specs


def load(path: Path, specs: list[ParamSpec], num_devices: int, **form: Any) -> Any:
    mesh = tensor_mesh(num_devices)
    shardings = None if mesh is None else {s.path: named_sharding(mesh, s.axes) for s in specs}.__getitem__
    return weights.load(path, specs, jnp.float32, shardings, matrix_transform(specs, **form))


def rows_of(arch: ArchConfig, spec: ParamSpec, index: int, n: int) -> np.ndarray:
    """Return the rows of the whole tensor that device `index` needs: query heads and their keys, ffn, tokens."""
    name, N = spec.path[-1], spec.shape[0]
    rows = np.arange(N)
    if name in ("qkv_proj", "qkv_bias"):
        Q, K = arch.attention.num_heads, arch.attention.num_kv_heads
        own = np.arange(Q).reshape(n, -1)[index]
        kv = [
            own[j * len(own) // arch.local(n).attention.num_kv_heads] // (Q // K)
            for j in range(arch.local(n).attention.num_kv_heads)
        ]
        heads = np.concatenate([own, Q + np.array(kv), Q + K + np.array(kv)])
        return rows.reshape(Q + 2 * K, -1)[heads].reshape(-1)
    if name in ("gate_up_proj", "gate_up_bias"):
        return rows.reshape(2, n, -1)[:, index].reshape(-1)
    if name in ("up_proj", "up_bias"):
        return np.split(rows, n)[index]
    if name in ("embed", "lm_head"):
        return rows[index * -(-N // n) : (index + 1) * -(-N // n)]
    return rows


def part_of(array: np.ndarray, arch: ArchConfig, spec: ParamSpec, index: int, n: int) -> np.ndarray:
    """Return rows and columns of a tensor, or of its scales, that device `index` needs; zeros past the last row."""
    part = array[rows_of(arch, spec, index, n)]
    if spec.path[-1] in ("o_proj", "down_proj") and part.shape[1:] != (1,):  # else a scale of whole rows
        part = np.split(part, n, axis=1)[index]
    missing = -(-len(array) // n) - len(part) if spec.path[-1] in ("embed", "lm_head") else 0
    return np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1))


@CONFIGS_AND_FORMS
@pytest.mark.parametrize("n", mainly([4], 3))  # two of 4 devices hold each KV head, and the vocabulary is padded
def test_each_device_has_its_part_in_the_form_of_the_whole(
    tmp_path: Path, config: dict[str, Any], n: int, form: str
) -> None:
    arch, specs = build(tmp_path, config)
    quantized, packed = "form" in FORMS[form], "packed" in form
    whole, split = weights.dummy(specs, SEED, jnp.float32), load(tmp_path, specs, n, **FORMS[form])
    for spec in specs:
        arrays = [np.asarray(leaf_at(whole, spec.path))]
        if quantized and spec.is_matrix:
            arrays = list(float8.FORMAT.encode(arrays[0], ()) if form == "fp8" else quantize(arrays[0]))
        for index in range(n):
            parts = [part_of(array, arch, spec, index, n) for array in arrays]
            if packed and spec.is_matrix and spec.path != ("embed",):
                parts = jax.tree.leaves(packed_linear.pack(*jax.device_put(parts), gated=spec.gated))
            elif quantized and spec.is_matrix:
                parts[1] = parts[1].T  # scales lie on devices by group
            found = [leaf.addressable_shards[index].data for leaf in jax.tree.leaves(leaf_at(split, spec.path))]
            for a, b in zip(found, parts, strict=True):
                np.testing.assert_array_equal(a, b, str(spec.path))


@pytest.mark.parametrize("form", [form for form in FORMS if "int8" in form])
def test_shards_keep_scale_blocks_whole(tmp_path: Path, form: str) -> None:
    """Blocks have 64 of 1152 columns, but 72 of the 288 columns that each of four devices has."""
    arch, specs = build(tmp_path, intermediate_size=1152)
    whole, split = weights.dummy(specs, SEED, jnp.float32), load(tmp_path, specs, 4, **FORMS[form])
    (spec,) = (spec for spec in specs if spec.path[-1] == "down_proj")
    assert (block_size(1152), block_size(288)) == (64, 72)
    for index in range(4):
        parts = list(quantize(part_of(np.asarray(leaf_at(whole, spec.path)), arch, spec, index, 4)))
        if "packed" in form:
            parts = jax.tree.leaves(packed_linear.pack(*jax.device_put(parts)))
        else:
            parts[1] = parts[1].T  # scales lie on devices by group
        found = [leaf.addressable_shards[index].data for leaf in jax.tree.leaves(leaf_at(split, spec.path))]
        for a, b in zip(found, parts, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("config", mainly([CONFIG], GPT2))
@pytest.mark.parametrize("n", mainly([4], 3))
def test_random_weights_are_those_of_one_device(tmp_path: Path, config: dict[str, Any], n: int) -> None:
    _, specs = build(tmp_path, config)
    mesh, loaded = tensor_mesh(n), load(tmp_path, specs, n)
    assert mesh is not None
    random = weights.dummy(specs, SEED, jnp.float32, transform=partial(split_array, mesh=mesh))
    jax.tree.map(np.testing.assert_array_equal, random, loaded)
    assert jax.tree.map(lambda leaf: leaf.sharding, random) == jax.tree.map(lambda leaf: leaf.sharding, loaded)


@pytest.mark.parametrize("tied", [False, True])
def test_every_number_is_read_by_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    _, specs = build(tmp_path, vocab_size=132, tie_word_embeddings=tied)
    whole = load(tmp_path, specs, 1)
    copied = []
    copy = stored_tensor._copy
    monkeypatch.setattr(stored_tensor, "_copy", lambda piece: (copied.append(piece[1].nbytes), copy(piece)))
    split = load(tmp_path, specs, 6)
    assert sum(copied) == device_bytes(whole)
    replicated = sum(4 * int(np.prod(spec.shape)) for spec in specs if spec.split_dimension is None)
    assert device_bytes(split) == (device_bytes(whole) - replicated) // 6 + replicated
    assert replicated < device_bytes(whole) / 100


@CONFIGS_AND_FORMS
def test_an_orbax_checkpoint_is_the_same_on_any_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], form: str
) -> None:
    """No device's part is a multiple of the chunks."""
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 30_000)
    overrides = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1024}
    overrides = {"n_head": 16} if config is GPT2 else overrides
    _, specs = build(tmp_path / "hf", config, **overrides)
    weights.convert(tmp_path / "hf", tmp_path / "orbax", specs)
    for n in (1, 4):
        found, wanted = (load(tmp_path / name, specs, n, **FORMS[form]) for name in ("orbax", "hf"))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.sharding == b.sharding
            for part, expected in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_array_equal(part.data, expected.data)


def bytes_read() -> int:
    """Return the bytes that TensorStore has read from files."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_devices_together_read_an_orbax_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of devices reads them, aligned with chunks or not; the chunks are a large model's, scaled down."""
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 64 << 10)
    _, specs = build(tmp_path / "hf", hidden_size=1024, intermediate_size=3072, vocab_size=1200)
    weights.convert(tmp_path / "hf", tmp_path / "orbax", specs)
    num_bytes = sum(4 * int(np.prod(spec.shape)) for spec in specs)
    copied = []
    copy = stored_tensor._copy
    monkeypatch.setattr(stored_tensor, "_copy", lambda piece: (copied.append(piece[1].nbytes), copy(piece)))
    for n, form in ((1, FORMS["float"]), (6, FORMS["float"]), (6, FORMS["int8"])):
        copied.clear()
        before = bytes_read()
        load(tmp_path / "orbax", specs, n, **form)
        assert sum(copied) == num_bytes
        assert num_bytes < bytes_read() - before < 1.2 * num_bytes, (n, form)


@pytest.mark.parametrize("form", ["float", "int8"])  # placed whole, and slab by slab
@pytest.mark.parametrize("checkpoint", ["hf", "orbax"])
def test_threads_read_what_a_device_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str, form: str
) -> None:
    """The first two pieces of one device's part of a matrix wait for each other."""
    _, specs = build(tmp_path / "hf", hidden_size=512, vocab_size=2000)
    weights.convert(tmp_path / "hf", tmp_path / "orbax", specs)
    copy, meeting, first = stored_tensor._copy, Barrier(2), Semaphore(2)

    def copy_together(piece: stored_tensor.Piece) -> None:
        if piece[0].ndim == 2 and first.acquire(blocking=False):
            meeting.wait(timeout=20)
        copy(piece)

    monkeypatch.setattr(stored_tensor, "_READ_BYTES", 30_000)
    monkeypatch.setattr(stored_tensor, "_copy", copy_together)
    load(tmp_path / checkpoint, specs, 2, **FORMS[form])


def stored(path: Path, specs: list[ParamSpec]) -> dict[str, tuple[np.dtype, tuple[int, ...], bytes]]:
    """Return dtype, shape and bits of every tensor of a checkpoint."""
    tensors = open_checkpoint(path, specs).tensors
    return {name: (t.dtype, t.shape, np.asarray(t).tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize("n", mainly([4], 3))
@pytest.mark.parametrize(
    ("config", "save"),
    [
        pytest.param(CONFIG, weights.save, id="llama"),
        pytest.param(CONFIG, weights.save_orbax, id="llama-orbax"),
        pytest.param(GPT2, weights.save, id="gpt2"),
        pytest.param(GPT2, weights.save_orbax, id="gpt2-orbax", marks=pytest.mark.full),
    ],
)
def test_what_is_saved_from_devices_is_what_was_loaded(
    tmp_path: Path, config: dict[str, Any], save: Callable[..., None], n: int
) -> None:
    """The tensors are bit-identical, KV heads on several devices and a padded vocabulary included."""
    _, specs = build(tmp_path / "hf", config)
    save(tmp_path / "saved", specs, unsplit(specs, load(tmp_path / "hf", specs, n)), config)
    assert stored(tmp_path / "saved", specs) == stored(tmp_path / "hf", specs)
    assert weights.read_config(tmp_path / "saved") == weights.read_config(tmp_path / "hf")


@pytest.mark.parametrize("save", [weights.save, weights.save_orbax])
def test_arrays_that_are_split_in_order_are_saved_as_they_are(tmp_path: Path, save: Callable[..., None]) -> None:
    """Training runs have such arrays."""
    _, specs = build(tmp_path / "hf", vocab_size=132)
    mesh = tensor_mesh(4)
    assert mesh is not None
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    save(tmp_path / "saved", specs, weights.load(tmp_path / "hf", specs, shardings=shardings), CONFIG)
    assert stored(tmp_path / "saved", specs) == stored(tmp_path / "hf", specs)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "float"])
def test_matrices_in_another_form_are_not_saved(tmp_path: Path, form: str) -> None:
    _, specs = build(tmp_path / "hf")
    params = unsplit(specs, load(tmp_path / "hf", specs, 2, **FORMS[form]))
    with pytest.raises(weights.CheckpointError, match=r"of an unsupported dtype: .*layers/0/qkv_proj"):
        weights.save_orbax(tmp_path / "saved", specs, params, CONFIG)
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]

"""Orbax checkpoints: the tensors of the Hugging Face ones they were made from, to the bit, and back again."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from orbax.checkpoint import v1 as ocp

from jaxserve import weights
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import registry
from jaxserve.models.params import ParamSpec, matrix_transform
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights import CheckpointError, convert, orbax_store, safetensors_store
from jaxserve.weights.new_directory import new_directory
from jaxserve.weights.stored_tensor import Part, StoredTensor
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.parameters import some_by_default
from tests.random_configs import random_configs
from tests.random_runs import examples

TEXTS = {
    "generation_config.json": '{"eos_token_id": [2, 3]}',
    "tokenizer.json": "{}\n",
    "tokenizer.model": "\x00\x01",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "README.md": "# A model",
    "modules.json": '[{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": '{"pooling_mode_lasttoken": true}',
}
LEFT = {"pytorch_model.bin": "", ".gitattributes": "", "old/model.safetensors": "", "flax_model.msgpack": ""}


def specs_of(path: Path) -> list[ParamSpec]:
    return registry.param_specs(registry.from_hf_config(weights.read_config(path)))


def add_files(path: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)


def files(path: Path) -> dict[str, bytes]:
    """Return the content of all files except weights."""
    found = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    return {name: data for name, data in found.items() if not re.match(r"orbax/|model.*safetensors", name)}


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bits of all tensors of a Hugging Face directory."""
    found = safetensors_store.open_tensors(path)
    return {name: (str(t.dtype), t.shape, np.asarray(t).tobytes()) for name, t in found.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    write_checkpoint(path, "llama", dtype="bfloat16")
    add_files(path, TEXTS)
    return path


@pytest.fixture(scope="module")
def orbax(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orbax")
    convert(source, path, specs_of(source))
    return path


@pytest.mark.parametrize("dtype", some_by_default(["float32", "float16", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("family", some_by_default(FAMILIES, "gpt2", "gpt_oss", "qwen3_5"))
def test_round_trip_keeps_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str) -> None:
    """Conversion keeps odd sizes, ties, biases and several files; chunks cut tensors, written a few at a time."""
    monkeypatch.setattr(orbax_store, "_GROUP_BYTES", 20_000)
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 1000)
    (sizes,) = random_configs(family, 1, seed=len(dtype))
    there, back = tmp_path / "there", tmp_path / "back"
    write_checkpoint(tmp_path / "hf", family, dtype=dtype, max_shard_size="30KB", **sizes)
    add_files(tmp_path / "hf", TEXTS | LEFT)
    specs = specs_of(tmp_path / "hf")
    convert(tmp_path / "hf", there, specs)
    convert(there, back, specs)
    assert tensors(back) == tensors(tmp_path / "hf")
    kept = {name: data for name, data in files(tmp_path / "hf").items() if name not in LEFT}
    assert files(there) == files(back) == kept
    assert "config.json" in kept
    assert {f.name for f in tmp_path.iterdir()} == {"hf", "there", "back"}
    assert not list(there.rglob("*.safetensors"))
    assert not list(back.rglob("*orbax*"))


def test_orbax_reads_hugging_face_names(source: Path, orbax: Path) -> None:
    loaded = ocp.load(orbax / "orbax")
    expected = safetensors_store.open_tensors(source)
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_tensors_that_are_not_loaded_are_converted_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "llama", tie_word_embeddings=True)
    file = tmp_path / "hf" / "model.safetensors"
    more = {"lm_head.weight": np.ones((131, 64), np.float32), "a.rotary_emb.inv_freq": np.arange(8.0)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | more, file)
    convert(tmp_path / "hf", tmp_path / "there", specs_of(tmp_path / "hf"))
    convert(tmp_path / "there", tmp_path / "back", specs_of(tmp_path / "hf"))
    assert tensors(tmp_path / "back") == tensors(tmp_path / "hf")
    assert more.keys() <= tensors(tmp_path / "back").keys()


FORMS: list[dict[str, Any]] = [{}, {"form": weight_format("int8")}]
CASES = [(form, dtype) for form in FORMS for dtype in (None, "float32")]
if packed_linear.unsupported("float32", "cpu") is None:  # packed matrices need the native kernels
    CASES += [({**form, "native": True}, "float32") for form in FORMS]


@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_orbax_loads_like_its_safetensors_source(
    source: Path, orbax: Path, form: dict[str, Any], dtype: str | None
) -> None:
    specs = specs_of(source)
    wanted, found = (
        weights.load(path, specs, dtype and jnp.dtype(dtype), transform=matrix_transform(specs, **form))
        for path in (source, orbax)
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert array.dtype == expected.dtype
        assert np.asarray(array).tobytes() == np.asarray(expected).tobytes()


@st.composite
def slices(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[slice, ...]]]:
    """An array, and slices of its slices, equal numpy's."""
    shape = draw(hnp.array_shapes(max_dims=2, max_side=20))
    dtype = draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]))
    array, taken = np.random.default_rng(0).normal(size=shape).astype(dtype), []
    bound = st.none() | st.integers(-25, 25)
    for _ in range(draw(st.integers(1, 3))):
        taken.append(tuple(slice(draw(bound), draw(bound)) for _ in range(draw(st.integers(1, len(shape))))))
    return array, taken


@given(slices())
@settings(max_examples=examples(25))
def test_chunked_slices_equal_numpy(tmp_path_factory: pytest.TempPathFactory, case: tuple[np.ndarray, Any]) -> None:
    array, taken = case
    path = tmp_path_factory.mktemp("slices")
    mapped = np.memmap(path / "array", array.dtype, "w+", shape=array.shape)
    mapped[:] = array
    told: list[int] = []
    orbax_store.write_tensors(path, {"a.b": np.asarray(mapped)}, told.append)
    assert told == [array.nbytes]
    tensor = orbax_store.open_tensors(path)["a.b"]
    for index in taken:
        tensor, array = tensor[index], array[index]
        assert (tensor.shape, tensor.dtype, len(tensor)) == (array.shape, array.dtype, len(array))
        assert tensor.nbytes == array.nbytes
        assert np.asarray(tensor).tobytes() == array.tobytes()


def bytes_read() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for value in metric["values"])


@pytest.mark.parametrize("shape", [(1024, 2048), (2048, 1024)])
def test_reads_little_more_than_the_requested_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Any
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 64 << 10)
    np.memmap(tmp_path / "array", np.float16, "w+", shape=shape)[:] = 1
    mapped = np.asarray(np.memmap(tmp_path / "array", np.float16, "r", shape=shape))
    orbax_store.write_tensors(tmp_path, {"a": mapped}, lambda _: None)
    rows, columns = (size // 4 for size in shape)

    def share_read(part: Callable[[Part], Part], use: Callable[[StoredTensor], object]) -> float:
        tensor = part(orbax_store.open_tensors(tmp_path)["a"])
        before = bytes_read()
        with ThreadPoolExecutor(1) as readers:  # one after the other, so that the bytes read do not depend on timing
            use(StoredTensor([tensor], np.dtype(np.float32), None, readers))
        return (bytes_read() - before) / mapped.nbytes

    for use in (StoredTensor.place, lambda tensor: tensor.each_slab(16, lambda *_: None)):
        assert share_read(lambda whole: whole, use) < 1.2
        assert share_read(lambda whole: whole[rows : 2 * rows], use) < 0.4
        assert share_read(lambda whole: whole[:, columns : 2 * columns], use) < 0.4


# What is refused


def test_existing_targets_are_refused(tmp_path: Path, source: Path, orbax: Path) -> None:
    (tmp_path / "file").touch()
    specs = specs_of(source)
    for path in (source, orbax, tmp_path, tmp_path / "file"):
        before = sorted(path.rglob("*"))
        with pytest.raises(CheckpointError, match="must be absent or an empty directory"):
            convert(source, path, specs)
        assert sorted(path.rglob("*")) == before
    with pytest.raises(CheckpointError, match="must not be inside"):
        convert(source, source / "orbax", specs)


def test_sources_in_neither_format_are_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in [("nowhere", "must be a local directory"), ("empty", "the folder `orbax` or")]:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / name, tmp_path / "target", specs_of(source))
    assert [f.name for f in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("form", ["source", "orbax"])
def test_differences_are_named(tmp_path: Path, request: pytest.FixtureRequest, form: str) -> None:
    path = request.getfixturevalue(form)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "attention_bias": True, "vocab_size": 130}
    other = registry.param_specs(registry.from_hf_config(config))
    with pytest.raises(CheckpointError) as error:
        convert(path, tmp_path / "target", other)
    with pytest.raises(CheckpointError) as loading:
        weights.check(path, other)
    assert str(error.value) == str(loading.value)
    for text in (
        "4 missing: model.layers.0.self_attn.q_proj.bias",
        "9 unexpected: model.layers.1.",
        "(131, 64) instead",
    ):
        assert text in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["source", "orbax"])
def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The interrupt comes amid the tensors."""
    path, target = request.getfixturevalue(form), tmp_path / "target"
    store = safetensors_store if form == "orbax" else orbax_store
    write, seen = store.write_tensors, []

    def interrupt(_num_bytes: int) -> None:
        seen.append({f.name for f in tmp_path.iterdir()})
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_store, "_GROUP_BYTES", 20_000)
    monkeypatch.setattr(store, "write_tensors", lambda directory, tensors, _: write(directory, tensors, interrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(path, target, specs_of(path))
    assert seen == [{".converting-target", ".converting-target.lock"}]
    assert not list(tmp_path.iterdir())


HANGS = """
import sys, time
from pathlib import Path
from jaxserve.weights.new_directory import new_directory
with new_directory(Path(sys.argv[1])) as scratch:
    (scratch / "orbax").mkdir()
    (scratch / "orbax" / "half").touch()
    print("written", flush=True)
    time.sleep(600)
"""


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path, source: Path) -> None:
    """The next conversion removes what a killed one left, and nothing of a running one."""
    target, command = tmp_path / "target", [sys.executable, "-c", HANGS]
    with subprocess.Popen([*command, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        left = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"another process is writing .*target; wait"):
            convert(source, target, specs_of(source))
        convert(source, tmp_path / "other", specs_of(source))
        shutil.rmtree(tmp_path / "other")
        assert sorted(tmp_path.rglob("*")) == left
        process.kill()
    assert sorted(tmp_path.rglob("*")) == left
    convert(source, target, specs_of(source))
    assert list(tmp_path.iterdir()) == [target]
    assert not list(target.rglob("half"))
    weights.check(target, specs_of(source))


def test_concurrent_conversions_have_one_writer(tmp_path: Path) -> None:
    """Other processes get an error, and none of them disturbs the first."""
    target, alone = tmp_path / "target", Lock()

    def write(number: int) -> int | None:
        try:
            with new_directory(target) as scratch:
                assert alone.acquire(blocking=False)
                (scratch / "who").write_text(str(number))
                time.sleep(0.01)
                assert [file.name for file in scratch.iterdir()] == ["who"]
                alone.release()
        except CheckpointError:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            (winner,) = {*threads.map(write, range(8))} - {None}
            assert (target / "who").read_text() == str(winner)
            assert list(tmp_path.iterdir()) == [target]
            shutil.rmtree(target)


def test_damaged_orbax_files_are_reported(tmp_path: Path, source: Path) -> None:
    specs = specs_of(source)
    convert(source, tmp_path / "model", specs)
    largest = max((tmp_path / "model" / "orbax").rglob("*"), key=lambda f: f.is_file() and f.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="fault"):
        weights.load(tmp_path / "model", specs)
    for file in (tmp_path / "model" / "orbax").rglob("manifest.ocdbt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="must be a complete Orbax checkpoint"):
        weights.load(tmp_path / "model", specs)

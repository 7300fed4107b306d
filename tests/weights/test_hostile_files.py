"""Damaged and hostile files: each is refused in a line, and takes no more memory or time than its own size."""

import json
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxserve import ConfigError, weights
from jaxserve.models import registry
from jaxserve.text.loading import load_tokenizer
from jaxserve.weights import gguf_file, safetensors_store
from tests.weights.gguf_files import write_gguf
from tests.weights.llama_files import CONFIG, SPECS, assert_trees_equal, failure


class Attack(NamedTuple):
    """A file that is put into a directory, its reader, and the words in which that refuses it."""

    file: str
    content: bytes
    read: Callable[[Path], object]
    message: str


def safetensors(header: bytes | dict[str, Any], message: str = "must be a complete safetensors file") -> Attack:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"12345678"
    return Attack("model.safetensors", content, lambda path: weights.load(path, SPECS), message)


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFETENSORS = {
    "no JSON": safetensors(b"not json"),
    "no UTF-8": safetensors(b"\xff\xfe"),
    "an array": safetensors(b"[]"),
    "open arrays": safetensors(b"[" * 100_000),
    "nested arrays": safetensors(b'{"a": %b}' % (b"[" * 900 + b"]" * 900)),
    "a name twice": safetensors(
        b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "I8", "shape": [0]}}'
    ),
    "a shape beyond integers": safetensors(tensor(shape=[2**70, 0], offsets=[0, 0])),
    "a list of dtypes": safetensors(tensor(dtype=["F32"])),
    "no dtype": safetensors(tensor(dtype=[])),
    "an unknown dtype": safetensors(tensor(dtype="F4"), "dtype F4 is not one of F64, F32"),
    "a number for a tensor": safetensors({"a": 3}),
    "no place": safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "too few bytes": safetensors(tensor(shape=[2])),
    "an end before the start": safetensors(tensor(offsets=[4, 0])),
    "a start before the file": safetensors(tensor(offsets=[-4, 0])),
    "a negative shape": safetensors(tensor(shape=[-1], offsets=[0, 8])),
    "a shape of text": safetensors(tensor(shape=["x"])),
}


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def array(kind: int, count: int) -> bytes:
    return string(b"tokenizer.x") + struct.pack("<IIQ", 9, kind, count)


def row(shape: Sequence[int], offset: int = 0, kind: int = 0) -> bytes:
    return string(b"token_embd.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    metadata: bytes = b"", tensors: bytes = b"", *, num_keys: int = 1, num_tensors: int = 0, rest: int = 0
) -> Attack:
    content = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + metadata + tensors + bytes(rest)
    return Attack("model.gguf", content, weights.read_config, "must be a complete GGUF file")


def gguf_tensor(tensors: bytes, num_tensors: int = 1) -> Attack:
    return gguf(tensors=tensors, num_keys=0, num_tensors=num_tensors, rest=64)


GGUF = {
    "nested arrays": gguf(array(9, 1) + struct.pack("<IQ", 9, 1) * 100_000),
    "arrays of arrays": gguf(array(9, 2**60), rest=2**16),
    "keys": gguf(num_keys=2**60, rest=2**16),
    "length of a key": gguf(struct.pack("<Q", 2**62), rest=64),
    "length of a string": gguf(string(b"tokenizer.x") + struct.pack("<IQ", 8, 2**62)),
    "length of a string, wrapped": gguf(string(b"tokenizer.x") + struct.pack("<IQ", 8, 2**64 - 8), rest=64),
    "strings": gguf(array(8, 2**60), rest=2**16),
    "numbers": gguf(array(10, 2**61), rest=64),
    "type": gguf(string(b"tokenizer.x") + struct.pack("<I", 99)),
    "alignment": gguf(string(b"general.alignment") + struct.pack("<II", 4, 0), rest=64),
    "tensors": gguf(num_keys=0, num_tensors=2**60, rest=2**16),
    "dimensions": gguf_tensor(string(b"x") + struct.pack("<I", 2**31)),
    "shape": gguf_tensor(row([2**32, 2**32])),
    "quantised shape": gguf_tensor(row([2**63, 2**8], kind=8)),
    "no rows": gguf_tensor(row([32, 0], kind=8)),
    "no dimensions": gguf_tensor(row([])),
    "offset": gguf_tensor(row([4], offset=2**40)),
    "wrapped offset": gguf_tensor(row([4], offset=2**64 - 32)),
    "names": gguf_tensor(row([4]) * 2, num_tensors=2),
}
JSON_FILES: dict[str, Callable[[Path], object]] = {
    "config.json": weights.read_config,
    "hf_quant_config.json": weights.read_config,
    "adapter_config.json": weights.read_config,
    "model.safetensors.index.json": safetensors_store.open_tensors,
    "generation_config.json": weights.read_generation_config,
    "modules.json": weights.read_embedding_modules,
}


def nested(file: str, depth: int) -> Attack:
    content = b'{"eos_token_id": %b%b}' % (b"[" * (depth - 1), b"]" * (depth - 1))
    return Attack(file, content, JSON_FILES[file], f"{file} must nest arrays and objects at most 64 times")


def index(text: str, message: str = "model.safetensors.index.json") -> Attack:
    return Attack("model.safetensors.index.json", text.encode(), lambda path: weights.load(path, SPECS), message)


ATTACKS = {
    **{f"safetensors: {name}": attack for name, attack in SAFETENSORS.items()},
    **{f"GGUF: {name}": attack for name, attack in GGUF.items()},
    **{f"{file}, {depth} levels": nested(file, depth) for file in JSON_FILES for depth in (65, 900, 100_000)},
    **{f"index {text}": index(text) for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}')},
    "modules elsewhere": Attack(
        "modules.json",
        json.dumps([{"type": "a.Pooling", "path": "../other"}]).encode(),
        weights.read_embedding_modules,
        "must name folders inside its directory",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_json_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    attack = ATTACKS[name]
    if attack.file != "model.gguf":
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / attack.file).write_bytes(attack.content)
    with pytest.raises(weights.CheckpointError) as info:
        attack.read(tmp_path)
    assert attack.message in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", GGUF)
def test_a_damaged_file_has_no_tokenizer(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF[name].content)
    with pytest.raises(ConfigError, match="must have a tokenizer"):
        load_tokenizer(tmp_path / "model.gguf")


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 0.5, -1])
def test_truncated_files(checkpoint: Path, kept: float) -> None:
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data)) if kept == 0.5 else int(kept)])
    message = failure(checkpoint)
    assert str(file) in message
    assert "complete safetensors file" in message


def test_a_gguf_file_with_another_byte_is_refused_or_read(tmp_path: Path) -> None:
    """A file that ends anywhere, or has another byte in its header, raises nothing else."""
    whole, path = tmp_path / "whole.gguf", tmp_path / "model.gguf"
    write_gguf(whole, "Q8_0", num_hidden_layers=1)
    content, rng = whole.read_bytes(), np.random.default_rng(0)
    header_len = content.index(b"output_norm.weight") + 60
    ends = [0, 3, 4, 12, 24, 30, header_len // 2, header_len, len(content) // 2, len(content) - 64]
    for end in ends:
        path.write_bytes(content[:end])
        with pytest.raises(weights.CheckpointError, match=rf"must be a complete GGUF file, got {end} bytes"):
            weights.read_config(path)
    num_refused = 0
    for _ in range(100):
        changed = bytearray(content)
        changed[rng.integers(header_len)] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        gguf_file.parse.cache_clear()
        try:
            arch = registry.from_hf_config(weights.read_config(path))
            weights.check(path, registry.param_specs(arch), arch.schemes)
        except (weights.CheckpointError, ConfigError):
            num_refused += 1
    assert num_refused > 20


@pytest.mark.parametrize(("claimed", "most"), [(2**64 - 1, 192), (193, 192), (150_000_000, 100_000_000)])
def test_header_with_a_false_length_is_not_read(tmp_path: Path, claimed: int, most: int) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:  # sparse if large: it takes no space on the disk
        out.write(claimed.to_bytes(8, "little") + b"{}")
        out.truncate(200 if most == 192 else 200_000_000)
    tracemalloc.start()
    message = failure(tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"its header can have at most {most} bytes and claims {claimed}" in message
    assert peak_bytes < 2**20


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(200_000_000)  # sparse
    with pytest.raises(weights.CheckpointError, match=r"config\.json must have at most 100000000 bytes, got 200000000"):
        weights.read_config(tmp_path)


OUTSIDE = ["../other/model.safetensors", "{outside}/model.safetensors", "down/../../other/model.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, "x" * 5000, "x\0", ""])
def test_index_opens_no_files_outside_the_directory(tmp_path: Path, params: dict[str, Any], name: str) -> None:
    """Names lead nowhere else, whatever is there; links, of which the cache of the hub is made, do."""
    inside, outside = tmp_path / "model", tmp_path / "other"
    inside.mkdir()
    weights.save(outside, SPECS, params, CONFIG)
    index, names = inside / "model.safetensors.index.json", [name for spec in SPECS for name in spec.hf_names]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, name.format(outside=outside))}))
    expected = "must name files inside its directory" if name in OUTSIDE else "must name files beside it"
    message = failure(inside)
    assert expected in message
    assert "\n" not in message
    (inside / "link.safetensors").symlink_to(outside / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "link.safetensors")}))
    assert_trees_equal(weights.load(inside, SPECS), params)

"""Hugging Face directories: reading, refusals and their messages, writing."""

import json
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import transformers

from jaxserve import weights
from jaxserve.models import registry
from jaxserve.weights import safetensors_store, stored_tensor
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import FAMILIES, VARIED, write_checkpoint
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.weights.llama_files import CONFIG, SPECS, assert_trees_equal, changed, failure, read_all, rewrite

# What is read


def test_tree_holds_the_tensors_of_the_file(tmp_path):
    write_checkpoint(tmp_path, "qwen2", use_sliding_window=False)
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    params, tensors = weights.load(tmp_path, specs), read_all(tmp_path)
    for spec in specs:
        array = leaf_at(params, spec.path)
        assert isinstance(array, jax.Array)
        assert array.shape == spec.shape
        np.testing.assert_array_equal(array, np.concatenate([tensors[name] for name in spec.hf_names]))
    assert isinstance(params["layers"], list)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_dtypes(tmp_path, params, stored, dtype):
    params = changed(params, lambda x: x.astype(jnp.dtype(stored)))
    weights.save(tmp_path, SPECS, params, CONFIG)
    expected = params if dtype is None else changed(params, lambda x: x.astype(jnp.dtype(dtype)))
    assert_trees_equal(weights.load(tmp_path, SPECS, dtype and jnp.dtype(dtype)), expected)


def test_fused_tensors_of_different_dtypes_are_promoted(checkpoint, params):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda t: t.update({name: t[name].astype(np.float16)}))
    loaded = weights.load(checkpoint, SPECS)
    assert loaded["layers"][0]["qkv_proj"].dtype == jnp.float32
    np.testing.assert_allclose(loaded["layers"][0]["qkv_proj"], params["layers"][0]["qkv_proj"], atol=1e-4)


def test_large_tensors_are_read_in_several_pieces(checkpoint, params, monkeypatch):
    monkeypatch.setattr(stored_tensor, "_READ_BYTES", 1000)
    assert_trees_equal(weights.load(checkpoint, SPECS), params)


def test_layers_that_draft_tokens_are_left_out_and_named(checkpoint, params, caplog):
    """DeepSeek-V3's layer for multi-token prediction follows the others, and is known by its projection."""
    caplog.set_level("INFO", "jaxserve.weights.load")
    extra = {f"model.layers.2.{name}.weight": np.ones((4, 4), np.float32) for name in ("eh_proj", "self_attn.o_proj")}
    rewrite(checkpoint, lambda t: t.update(extra))
    assert_trees_equal(weights.load(checkpoint, SPECS), params)
    assert "layers that draft tokens are not part of the model: model.layers.2." in caplog.text


def test_computed_and_tied_tensors_are_ignored(checkpoint, params):
    tied = [spec for spec in SPECS if spec.path != ("lm_head",)]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    rewrite(checkpoint, lambda t: t.update(inv_freq, **{"lm_head.weight": t["model.embed_tokens.weight"]}))
    del params["lm_head"]
    assert_trees_equal(weights.load(checkpoint, tied), params)


@pytest.mark.parametrize("tied", [False, True])
def test_published_gpt_neox_files_are_read(tmp_path, tied):
    """They hold causal masks, and some a copy of the embeddings as the head."""
    write_checkpoint(tmp_path, "gpt_neox", tie_word_embeddings=tied)
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    expected = weights.load(tmp_path, specs)
    masks = {"bias": np.ones((1, 1, 4, 4), bool), "masked_bias": np.ones(1, np.float32)}
    more = {f"gpt_neox.layers.1.attention.{name}": mask for name, mask in masks.items()}
    more |= {"embed_out.weight": read_all(tmp_path)["gpt_neox.embed_in.weight"]} if tied else {}
    rewrite(tmp_path, lambda tensors: tensors.update(more))
    assert_trees_equal(weights.load(tmp_path, specs), expected)
    rewrite(tmp_path, lambda tensors: tensors.pop("gpt_neox.layers.1.attention.dense.bias"))
    with pytest.raises(weights.CheckpointError, match=r"1 missing: gpt_neox\.layers\.1\.attention\.dense\.bias"):
        weights.load(tmp_path, specs)


def test_older_gpt2_files_are_read(tmp_path):
    """They hold the model without its head, whose names have no prefix, and its causal masks."""
    write_checkpoint(tmp_path, "gpt2")
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    expected = weights.load(tmp_path, specs)
    names = {name: name.removeprefix("transformer.") for name in read_all(tmp_path)}

    def make_older(tensors):
        for name, older in names.items():
            tensors[older] = tensors.pop(name)
        tensors["h.0.attn.bias"], tensors["h.0.attn.masked_bias"] = np.ones((1, 1, 4, 4)), np.ones(1, bool)

    rewrite(tmp_path, make_older)
    assert_trees_equal(weights.load(tmp_path, specs), expected)
    assert_trees_equal(weights.assemble(read_all(tmp_path), specs), expected)
    rewrite(tmp_path, lambda tensors: tensors.pop("h.1.attn.c_attn.weight"))
    with pytest.raises(weights.CheckpointError, match=r"1 missing: transformer\.h\.1\.attn\.c_attn\.weight"):
        weights.load(tmp_path, specs)


def test_stored_parts_and_transposes_equal_the_file(tmp_path):
    write_checkpoint(tmp_path, "gpt2")
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    params, tensors = weights.load(tmp_path, specs), read_all(tmp_path)
    layer = params["layers"][1]
    np.testing.assert_array_equal(layer["qkv_proj"], tensors["transformer.h.1.attn.c_attn.weight"].T)
    np.testing.assert_array_equal(layer["qkv_bias"], tensors["transformer.h.1.attn.c_attn.bias"])
    np.testing.assert_array_equal(layer["up_proj"], tensors["transformer.h.1.mlp.c_fc.weight"].T)
    rewrite(tmp_path, lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": t["transformer.h.0.mlp.c_fc.weight"].T}))
    with pytest.raises(weights.CheckpointError, match=r"c_fc\.weight \(96, 64\) instead of \(64, 96\)"):
        weights.load(tmp_path, specs)


class Transfer:
    """A tensor in transfer to an accelerator, which reads the host's buffer until the transfer is waited for."""

    def __init__(self, tensor):
        self.buffer = tensor._read(None)
        self.nbytes = self.buffer.nbytes

    def block_until_ready(self):
        self.buffer = None


def test_host_memory_stays_near_one_tensor(tmp_path, monkeypatch):
    config = {**CONFIG, "vocab_size": 4000, "num_hidden_layers": 6, "intermediate_size": 16000}
    specs = registry.param_specs(registry.from_hf_config(config))
    weights.save(tmp_path, specs, weights.dummy(specs, 0, jnp.bfloat16), config)
    largest, total = (4 * measure(int(np.prod(s.shape)) for s in specs) for measure in (max, sum))
    monkeypatch.setattr(stored_tensor, "host_buffer", np.empty)  # tracemalloc sees it
    tracemalloc.start()
    params = weights.load(tmp_path, specs, jnp.float32, transform=lambda _, tensor: Transfer(tensor))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == total
    assert total > 8 * largest
    assert largest < peak < 2.5 * largest


def resident_bytes():
    """Return the resident memory of this process, including pages of mapped files."""
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the resident set from /proc")
def test_loading_leaves_no_mapped_pages_resident(tmp_path):
    """Loading takes the size of the weights, not that of the file as well."""
    config = {**CONFIG, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1, "vocab_size": 8192}
    specs = registry.param_specs(registry.from_hf_config(config))
    weights.save(tmp_path, specs, weights.dummy(specs, 0, jnp.float32), config)
    resident = [resident_bytes()]
    params = weights.load(
        tmp_path, specs, transform=lambda _, tensor: (resident.append(resident_bytes()), tensor.place())[1]
    )
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert size > 100e6
    assert max(resident) - resident[0] < 1.3 * size


def test_each_tensor_is_transformed_with_its_row(checkpoint, params):
    def transform(row, tensor):
        assert tensor.shape == row.shape
        return {"tensor": tensor.place(), "name": row.path[-1]}

    changed = weights.load(checkpoint, SPECS, transform=transform)
    for row in SPECS:
        assert leaf_at(changed, row.path)["name"] == row.path[-1]
        np.testing.assert_array_equal(leaf_at(changed, row.path)["tensor"], leaf_at(params, row.path))


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_slabs_cover_the_tensor(checkpoint, params, num_rows, dtype):
    def transform(row, tensor):
        whole, starts = np.zeros(tensor.shape, tensor.dtype), []

        def use(start, rows):
            starts.append(start)
            whole[start : start + num_rows] = rows

        tensor.each_slab(num_rows, use)
        assert sorted(starts) == list(range(0, row.shape[0], num_rows))
        return whole

    expected = params if dtype is None else changed(params, lambda x: x.astype(dtype))
    assert_trees_equal(weights.load(checkpoint, SPECS, dtype, transform=transform), expected)


# What is refused


def test_all_differences_are_named_together(checkpoint):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.extra"] = np.ones(2, np.float32)
        tensors["lm_head.weight"] = np.ones((131, 63), np.float32)
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((64, 64), np.int8)

    rewrite(checkpoint, change)
    message = failure(checkpoint)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "1 unexpected: model.layers.0.mlp.extra" in message
    assert "1 of another shape: lm_head.weight (131, 63) instead of (131, 64)" in message
    assert "1 of an unsupported dtype: model.layers.0.self_attn.q_proj.weight int8" in message


def test_messages_are_bounded(checkpoint):
    rewrite(checkpoint, lambda t: t.update({f"extra.{i}": np.ones(1, np.float32) for i in range(1000)}))
    message = failure(checkpoint)
    assert "1000 unexpected" in message
    assert "and 968 more" in message
    assert len(message) < 2000


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.float64, np.int8, np.uint8])
def test_quantized_dtypes(tmp_path, dtype):
    name, array = "model.norm.weight", np.ones(64, dtype)
    safetensors.numpy.save_file({name: array}, tmp_path / "model.safetensors")
    message = failure(tmp_path, [spec for spec in SPECS if spec.hf_names == (name,)])
    assert f"{name} {np.dtype(dtype)}" in message
    assert "quantized" in message


def test_index_names_absent_files(tmp_path, params):
    weights.save(tmp_path, SPECS, params, CONFIG, max_shard_bytes=50_000)
    first, second, *_ = sorted(tmp_path.glob("model-*"))
    first.unlink()
    second.unlink()
    message = failure(tmp_path)
    assert first.name in message
    assert second.name in message


def test_tensors_missing_from_index_or_files_are_named(tmp_path, params):
    weights.save(tmp_path, SPECS, params, CONFIG, max_shard_bytes=50_000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    forgotten = {name: of for name, of in index["weight_map"].items() if name != "model.norm.weight"}
    file.write_text(json.dumps(index | {"weight_map": forgotten}))
    assert "1 missing: model.norm.weight" in failure(tmp_path)
    last = {"lm_head.weight": min(name for name in forgotten.values() if name != forgotten["lm_head.weight"])}
    file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | last}))
    assert "must name tensors that the files have, got lm_head.weight in none" in failure(tmp_path)


def test_peft_adapter_is_refused_with_merge_advice(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(weights.CheckpointError, match=r"a PEFT adapter of org/base.*merge_and_unload"):
        weights.read_config(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(weights.CheckpointError, match="a diffusers pipeline"):
        weights.read_config(tmp_path)


def test_torch_weights_are_refused_with_conversion_advice(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    message = failure(tmp_path)
    assert "pytorch_model.bin" in message
    assert "convert" in message


def test_missing_weights_error_lists_the_directory(tmp_path):
    assert "got an empty directory" in failure(tmp_path)
    assert "absent" in failure(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "a file" in failure(tmp_path / "file")
    assert "got file" in failure(tmp_path)


def test_config_is_read_or_refused(tmp_path):
    with pytest.raises(weights.CheckpointError, match=r"must contain config\.json or .* got an empty directory"):
        weights.read_config(tmp_path)
    with pytest.raises(weights.CheckpointError, match="local directory"):
        weights.read_config(tmp_path / "nowhere")
    assert weights.read_generation_config(tmp_path) == {}
    for name, read in [
        ("config.json", weights.read_config),
        ("generation_config.json", weights.read_generation_config),
    ]:
        (tmp_path / name).write_text('{"hidden_size": 3}')
        assert read(tmp_path) == {"hidden_size": 3}
        for text in ("{", "[1]", "\udcff"):
            (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
            with pytest.raises(weights.CheckpointError, match=re.escape(name)):
                read(tmp_path)


# What is written


@pytest.mark.parametrize("family", some_by_default(FAMILIES, *VARIED))
def test_transformers_reads_what_is_saved(tmp_path, family):
    source = tmp_path / "source"
    model = write_checkpoint(source, family, dtype="bfloat16")
    config = weights.read_config(source)
    specs = registry.param_specs(registry.from_hf_config(config))
    params = weights.load(source, specs)
    for max_shard_bytes in (5_000_000_000, 40_000):
        target = tmp_path / str(max_shard_bytes)
        weights.save(target, specs, params, config, max_shard_bytes=max_shard_bytes)
        assert_trees_equal(weights.load(target, specs), params)
        again = transformers.AutoModelForCausalLM.from_pretrained(target)
        assert again.dtype == torch.bfloat16
        assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(target)}
        expected = model.state_dict()
        assert again.state_dict().keys() == expected.keys()
        assert all((tensor.float() == expected[name]).all() for name, tensor in again.state_dict().items())


def test_shards_are_filled_up_to_the_limit(tmp_path, params):
    limit = 40_000
    weights.save(tmp_path, SPECS, params, CONFIG, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    sizes = [sum(t.nbytes for t in safetensors.numpy.load_file(tmp_path / f).values()) for f in files]
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert max(sizes) <= limit
    assert min(a + b for a, b in pairwise(sizes)) > limit


def test_safetensors_package_reads_written_files(checkpoint):
    with safetensors.safe_open(checkpoint / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {name for spec in SPECS for name in spec.hf_names}


def test_saving_replaces_weights_and_keeps_other_files(tmp_path, params):
    weights.save(tmp_path, SPECS, params, CONFIG, max_shard_bytes=40_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    new = changed(params, lambda x: x + 1)
    weights.save(tmp_path, SPECS, new, CONFIG)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_trees_equal(weights.load(tmp_path, SPECS), new)
    weights.save(tmp_path, SPECS, params, CONFIG, max_shard_bytes=40_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert_trees_equal(weights.load(tmp_path, SPECS), params)


def test_failed_save_leaves_the_old_checkpoint(checkpoint, params, monkeypatch):
    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors_store, "_write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        weights.save(checkpoint, SPECS, changed(params, lambda x: x + 1), CONFIG)
    assert sorted(f.name for f in checkpoint.iterdir()) == ["config.json", "model.safetensors"]
    assert_trees_equal(weights.load(checkpoint, SPECS), params)


def test_config_dtype_equals_the_weights(tmp_path, params):
    half = changed(params, lambda x: x.astype(jnp.bfloat16))
    weights.save(tmp_path, SPECS, half, {**CONFIG, "dtype": "float32", "torch_dtype": "float32"})
    config = weights.read_config(tmp_path)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_params_that_do_not_fit_are_named(tmp_path, params):
    del params["final_norm"]
    params["embed"] = jax.device_put(np.asarray(params["embed"])[:5])
    params["lm_head"] = jax.device_put(np.asarray(params["lm_head"]).astype(np.int8))
    with pytest.raises(weights.CheckpointError) as error:
        weights.save(tmp_path, SPECS, params, CONFIG)
    for text in ("1 missing: final_norm", "embed (5, 64) instead of (131, 64)", "lm_head int8"):
        assert text in str(error.value)
    assert list(tmp_path.iterdir()) == []

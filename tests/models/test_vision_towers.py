"""Vision towers against transformers' image features in float32."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxserve import weights
from jaxserve.errors import ConfigError
from jaxserve.execution.encoder_program import encoder_buckets, make_parts, outer, tower_layers
from jaxserve.images.prepared import PreparedImage
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models.params import POSITION_EMBED, matrix_transform
from jaxserve.models.vision import tower
from jaxserve.models.vision.inputs import EncoderInputs
from jaxserve.pallas_kernels import packed_linear
from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.layout import encode_tensors, quantization_config
from jaxserve.tools.quantizer.rounding import round_to_nearest
from jaxserve.tools.quantizer.scheme import SCHEMES
from jaxserve.weights import safetensors_store
from jaxserve.weights.rows import hf_shapes
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED
from tests.vision_checkpoints import FAMILIES, PUBLISHED, published, random_tensors


@partial(jax.jit, static_argnames="arch", compiler_options=UNOPTIMIZED)
def encode(params, arch, inputs):
    return tower.encode(params, arch, inputs)


def load_tower(path, make_transform=matrix_transform):
    """Return the arch and the parameters of the tower at `path` in float32."""
    arch = tower.read_tower(weights.read_config(path))
    specs = tower.tower_specs(arch)
    params = weights.load(path, specs, jnp.float32, transform=make_transform(specs), prefix=tower.PREFIXES)
    return arch, params["vision"]


def random_images(arch, grids, sizes=()):
    """Return images of these grids with random patches; `sizes` has the pixels, and the tiles, of each."""
    rng = np.random.default_rng(0)
    tiles = [tiles for _, tiles in sizes] or [1] * len(grids)
    shapes = [(rows * columns * number, arch.patch_size) for (rows, columns), number in zip(grids, tiles, strict=True)]
    images = [(grid, rng.standard_normal(size).astype(np.float32)) for grid, size in zip(grids, shapes, strict=True)]
    return [(*image, size) for image, (size, _) in zip(images, sizes, strict=True)] if sizes else images


def by_default(*chosen):
    """Return a parameter for each family; tests of those that are not chosen are long ones."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.long) for name in FAMILIES]


# Families computed by native kernels, and families with layers stacked for a scan; the others' are unrolled, by XLA.
NATIVE, STACKED = ("qwen2_5_vl", "gemma4_clipped", "llava_siglip"), ("qwen3_vl", "qwen2_vl", "gemma3")


@pytest.mark.parametrize(
    "name", by_default("llava", "onevision", "mistral3", "gemma3", "gemma4_clipped", "qwen2_5_vl", "qwen3_vl")
)
def test_embeddings_are_those_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    model = family.write(tmp_path)
    native = name in NATIVE and packed_linear.unsupported("float32", "cpu") is None
    arch, params = load_tower(tmp_path, partial(matrix_transform, native=native))
    params = tower.stacked(params, arch) if name in STACKED else params
    images = random_images(arch, family.grids, family.sizes)
    num_patches = sum(len(patches) for _, patches, *_ in images)
    size = None if arch.grid is None else num_patches  # together more than the largest bucket
    inputs = tower.pack(arch, images, size)
    embeddings = np.asarray(encode(params, arch, inputs))
    expected = family.embeddings(model, images)
    if family.sizes:
        counts = [arch.tiles.num_embeddings(arch.grid, size) for size, _ in family.sizes]
    else:
        counts = [arch.num_embeddings(grid) for grid in family.grids]
    assert expected.shape == (sum(counts), arch.row_size)
    assert len(embeddings) == arch.max_embeddings(len(inputs.patches)) >= len(expected)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(embeddings[: len(expected)], expected, rtol=0, atol=1e-4)
    assert np.isfinite(embeddings).all()


def random_tower(name, **vision):
    """Return the arch of a family's tower, its specs and random tensors by name."""
    family = FAMILIES[name]
    arch = tower.read_tower(dataclasses.replace(family, vision=family.vision | vision).config_dict())
    specs = tower.tower_specs(arch)
    return arch, specs, random_tensors(specs)


def test_gemma4_rounds_pixels_after_it_has_scaled_them():
    """Near the middle grey, bfloat16 has few values before scaling, and many after it."""
    arch = tower.read_tower(FAMILIES["gemma4"].config_dict())
    matrix = np.random.default_rng(0).standard_normal((arch.hidden_size, arch.patch_size)).astype(jnp.bfloat16)
    params = {"patch_proj": matrix, POSITION_EMBED: np.zeros((2, 1, arch.hidden_size), jnp.bfloat16)}
    patches = np.tile(np.arange(112, 144, dtype=np.float32)[:, None] / 255, (1, arch.patch_size))
    inputs = EncoderInputs(patches, positions=np.zeros((len(patches), 2), np.int32))
    scaled = (2 * (patches - 0.5)).astype(jnp.bfloat16)
    expected = scaled.astype(np.float32) @ matrix.astype(np.float32).T
    embed = jax.jit(partial(tower.ENCODERS["gemma4"].embed, arch=arch), compiler_options=UNOPTIMIZED)
    embedded = np.asarray(embed(params, inputs=inputs), np.float32)
    np.testing.assert_allclose(embedded, expected, rtol=2**-8, atol=2**-9 * np.abs(expected).max())


@pytest.mark.parametrize("name", by_default("llava", "gemma4_clipped"))
def test_saved_towers_load_again(name, tmp_path):
    """Names, shapes and stacks of all families survive, and dtypes of matrices are those asked for."""
    arch, specs, tensors = random_tower(name)
    params = weights.assemble(tensors, specs)
    weights.save(tmp_path, specs, params, FAMILIES[name].config_dict())
    assert tower.read_tower(weights.read_config(tmp_path)) == arch
    again = weights.load(tmp_path, specs, prefix=tower.PREFIXES)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    narrow = matrix_transform(specs, matrix_dtype=jnp.bfloat16)
    layer = weights.assemble(tensors, specs, jnp.float32, transform=narrow)["vision"]["layers"][0]
    assert (layer["o_proj"].dtype, jax.tree.leaves(layer["input_norm"])[0].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3-vl-4b" else pytest.mark.long) for name in PUBLISHED]
)
def test_published_towers_have_these_tensors(name):
    """Names and shapes are those of transformers' models, which are made without memory."""
    stem, vision, hidden_size = PUBLISHED[name]
    text = {"hidden_size": hidden_size, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    text |= {"model_type": "gemma3_text"} if stem == "Gemma3" else {}
    config = getattr(transformers, f"{stem}Config")(vision_config=vision, text_config=text)
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    expected = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name.startswith(tower.PREFIXES)
    }
    specs = tower.tower_specs(published(name))
    found = {name: shape for spec in specs for name, shape in weights.rows.hf_shapes(spec).items()}
    unread = {name for spec in specs for name in spec.unread}
    scalars = {name: () for name, shape in expected.items() if shape == () and found.get(name) == (1,)}
    assert found | scalars == {name: shape for name, shape in expected.items() if name not in unread}


def test_more_patches_than_the_largest_bucket_are_refused(tmp_path):
    arch = tower.read_tower(FAMILIES["llava"].config_dict())
    with pytest.raises(ConfigError, match=r"at most 25 patches, got 50"):
        tower.pack(arch, random_images(arch, ((5, 5),) * 2))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "onevision", "mistral3"])
def test_images_prepared_for_another_model_are_refused(name):
    family = FAMILIES[name]
    arch = tower.read_tower(family.config_dict())

    def image(patches, grid, num_embeddings, size=(0, 0)):
        return PreparedImage(bytes(16), np.zeros(patches, np.float32), grid, num_embeddings, size)

    size, num_tiles = family.sizes[0] if family.sizes else ((0, 0), 1)
    grid, (rows, columns) = family.grids[0], family.grids[0]
    num_patches = num_tiles * rows * columns
    count = arch.tiles.num_embeddings(grid, size) if arch.tiles else arch.num_embeddings(grid)
    shape = num_patches, arch.patch_size
    assert arch.misfit(image(shape, grid, count, size)) is None
    for patches, own_grid, number, message in [
        ((num_patches, arch.patch_size + 1), grid, count, "prepared for this model"),
        ((num_patches - 1, arch.patch_size), grid, count, "prepared for this model"),
        ((0, 0), grid, count, "got 0 patches of 0 values"),
        (shape, (rows + 1, columns), count, "prepared for this model"),
        (shape, grid, count + 1, f"{count} embeddings, got"),
        (shape, (0, columns), count, "prepared for this model"),
        ((arch.buckets[-1] + 1, 0), grid, count, "at most"),
    ]:
        assert message in arch.misfit(image(patches, own_grid, number, size))


def test_flops_are_those_of_the_published_tower():
    """OpenCLIP counts 191 G multiply-adds for ViT-L/14 with 336 pixels; the projector has 21 M weights."""
    flops = tower.num_flops(published("llava-1.5-7b"), 576)
    assert flops == pytest.approx(2 * (191e9 * 23 / 24 + 576 * 21e6), rel=0.02)


def test_programs_hold_images_in_tiles_that_are_mostly_padding():
    arch, size = published("llava-onevision-7b"), (1536, 390)
    rows, columns = arch.tiles.best(size)
    num_patches = (1 + rows * columns // arch.tiles.tile_size**2) * arch.grid[0] * arch.grid[1]
    num_embeddings = arch.tiles.num_embeddings(arch.grid, size)
    assert num_embeddings < 4096
    assert arch.bucket(num_patches) in encoder_buckets(arch, 4096)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_feature_layer": -5}, r"vision_feature_layer must be from -4 to 3.*got \[-5\]"),
        ({"vision_feature_select_strategy": "last"}, "vision_feature_select_strategy must be one of .*default"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act must be"),
        ({"vision_config": {"model_type": "sam"}}, "model_type must be"),
        ({"vision_config": {"hidden_size": 30, "num_attention_heads": 4}}, "num_attention_heads must divide"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "must be full for an encoder without a class token"),
    ],
)
def test_unsupported_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        tower.read_tower(FAMILIES["llava"].config_dict() | fields)


@pytest.mark.parametrize(
    ("quantization", "is_quantised"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["visual"]}, False),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.visual.blocks.0.attn.qkv"]}, False),
        ({"quant_method": "fp8", "modules_to_not_convert": ["visual.blocks.0.attn.qkv"]}, False),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, True),
    ],
)
def test_towers_left_out_of_quantisation_are_read_as_floats(quantization, is_quantised):
    config = FAMILIES["qwen2_5_vl"].config_dict() | {"quantization_config": quantization}
    schemes = weights.read_schemes(config)
    assert (schemes.for_tensor("model.visual.blocks.0.attn.qkv.weight") is not None) == is_quantised


@pytest.mark.long
def test_quantised_towers_are_computed_from_their_codes(tmp_path):
    """Matrices that a file stores as codes and scales have the values that these stand for."""
    arch, specs, tensors = random_tower("qwen2_5_vl")
    scheme, grid = SCHEMES["int8"], Grid(8, False, 1, None, np.dtype(np.float32))
    floats, stored = dict(tensors), dict(tensors)
    for name in (name for spec in specs if spec.is_matrix for name in hf_shapes(spec) if "patch_embed" not in name):
        codes, scales = round_to_nearest(jnp.asarray(stored.pop(name)), grid)
        floats[name] = np.asarray(grid.decode(codes, scales))
        stored |= encode_tensors(name, np.asarray(codes), np.asarray(scales), scheme, grid)
    config = FAMILIES["qwen2_5_vl"].config_dict() | {"quantization_config": quantization_config(scheme, grid)}
    safetensors_store.write_config(tmp_path, config)
    safetensors_store.write_tensors(tmp_path, stored)
    transform, schemes = matrix_transform(specs), weights.read_schemes(config)
    as_stored = matrix_transform(specs, weight_format(None, schemes))
    read = {"schemes": schemes, "transform": as_stored, "prefix": tower.PREFIXES}
    params = weights.load(tmp_path, specs, jnp.float32, **read)["vision"]
    expected = weights.assemble(floats, specs, jnp.float32, transform=transform)["vision"]
    assert len(jax.tree.leaves(params)) > len(jax.tree.leaves(expected))
    inputs = tower.pack(arch, random_images(arch, FAMILIES["qwen2_5_vl"].grids))
    found, wanted = (np.asarray(encode(each, arch, inputs)) for each in (params, expected))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("name", "is_scanned"), [("qwen3_vl", False), ("qwen2_5_vl", True), ("llava_layers", True)])
def test_parts_make_the_embeddings_of_the_whole(name, is_scanned):
    """Layer by layer, from a list or from stacks, as on TPUs."""
    family = FAMILIES[name]
    arch = tower.read_tower({**family.config_dict(), "architectures": [f"{family.name}ForConditionalGeneration"]})
    specs = tower.tower_specs(arch)
    params = weights.assemble(random_tensors(specs), specs, jnp.float32, transform=matrix_transform(specs))["vision"]
    inputs = tower.pack(arch, random_images(arch, family.grids[:1], family.sizes))
    expected = encode(params, arch, inputs)
    params = (
        tower.stacked({**params, "layers": [dict(each) for each in params["layers"]]}, arch) if is_scanned else params
    )
    state = jax.jit(lambda p, x: make_parts(arch).begin(p, x))(outer(params), inputs)
    layers = tower_layers(params)
    for number, each in enumerate(layers):
        numbers = jnp.array([each.row, *tower.layer_numbers(arch, number)])
        state = jax.jit(make_parts(arch, is_stacked=each.is_stacked).layer)(each.params, state, numbers)
    assert any(each.is_stacked for each in layers) == (is_scanned and 2 * arch.period <= arch.num_layers)
    rows = jnp.arange(len(expected), dtype=jnp.int32)
    found = make_parts(arch).finish(outer(params), jnp.zeros_like(expected), state, inputs._replace(patches=None), rows)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

"""Prompts with images over two devices: the tokens and log probabilities of transformers."""

from pathlib import Path

import pytest

from tests.e2e.test_pictures import Served, check_parts, num_encoded


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("qwen3_vl", "tensor_parallel_size"),
        ("qwen3_vl", "pipeline_parallel_size"),
        ("gemma3", "tensor_parallel_size"),
        pytest.param("gemma3", "pipeline_parallel_size", marks=pytest.mark.full),
    ],
)
def test_outputs_are_those_of_transformers(name: str, option: str, tmp_path: Path) -> None:
    """M-RoPE with DeepStack, and images whose tokens see each other; then images that are encoded in parts."""
    served = Served(tmp_path, name)
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3)]
    engine = served.engine(num_pages=200, encoder_cache_size=128, **{option: 2})
    for each, output in zip(prompts, served.run(prompts, engine), strict=True):
        served.check(each, output)
    if engine.schedule.sizes_in_parts:
        check_parts(served, engine)


def test_data_parallel_attention_changes_no_output(tmp_path: Path) -> None:
    """Rows are divided among devices, which all have the images' embeddings."""
    served = Served(tmp_path, "qwen3_vl_moe")
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3), prompt(1, image(1), 4)]
    sizes = {"num_pages": 100, "max_num_seqs": 2}
    options = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "enable_dp_attention": True}
    engine = served.engine(**sizes, **options)
    count = num_encoded(engine)
    for each, output in zip(prompts, served.run(prompts, engine), strict=True):
        served.check(each, output)
    assert count() == 3

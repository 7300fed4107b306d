"""Prompts with images over two devices: the tokens and log probabilities of transformers."""

from pathlib import Path

import pytest

from tests.e2e.test_pictures import Served


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """M-RoPE with DeepStack, and images whose tokens see each other."""
    served = Served(tmp_path, name)
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3)]
    outputs = served.run(prompts, served.engine(num_pages=200, tensor_parallel_size=2))
    for each, output in zip(prompts, outputs, strict=True):
        served.check(each, output)

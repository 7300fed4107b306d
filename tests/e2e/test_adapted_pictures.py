"""LoRA adapters of multimodal models: applied to the text part after images, refused for the tower."""

import warnings
from pathlib import Path

import pytest

from jaxserve.api.lora_request import LoRARequest
from jaxserve.errors import ConfigError, RequestError
from tests.adapters import STD
from tests.e2e.test_pictures import Served, tokens
from tests.oracles import torch

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.long
TOWERS = {"qwen2_5_vl": r"(qkv|gate_proj)", "llava": r"(q_proj|fc1)"}


def write_adapter(served: Served, path: Path, pattern: str) -> None:
    """Write an adapter with random factors for the modules whose names match a pattern, and adapt the oracle by it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads deprecated attributes
        model = peft.get_peft_model(served.pictures.model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = STD * torch.randn(parameter.shape)
    model.eval().save_pretrained(path)
    served.pictures.model = model


@pytest.mark.parametrize("name", TOWERS)
def test_adapters_have_the_outputs_of_peft(name: str, tmp_path: Path) -> None:
    served = Served(tmp_path / "model", name)
    image, prompt = served.pictures.image, served.pictures.prompt
    prompts = [prompt(7), prompt(5, image(1), 9), prompt(3, image(2), 2, image(3), 3)]
    plain = [tokens(output) for output in served.run(prompts)]
    write_adapter(served, tmp_path / "text", r".*language_model.*(q_proj|v_proj|down_proj)")
    engine = served.engine(enable_lora=True)
    adapter = LoRARequest("text", 1, str(tmp_path / "text"))
    outputs = [served.add(engine, str(index), each, lora_request=adapter) for index, each in enumerate(prompts)]
    outputs.append(served.add(engine, "base", prompts[1]))
    served.finish(engine)
    assert tokens(outputs.pop()) == plain[1]
    for each, output in zip(prompts, outputs, strict=True):
        served.check(each, output)
    assert [*map(tokens, outputs)] != plain
    again = served.add(engine, "again", prompts[1], lora_request=adapter)
    served.finish(engine)
    assert again.num_cached_tokens
    assert tokens(again) == tokens(outputs[1])


@pytest.mark.parametrize("name", TOWERS)
def test_adapters_of_the_tower_are_refused_by_name(name: str, tmp_path: Path) -> None:
    served = Served(tmp_path / "model", name)
    write_adapter(served, tmp_path / "tower", rf".*(visual|vision_tower).*\.{TOWERS[name]}")
    engine = served.engine(enable_lora=True)
    with pytest.raises((RequestError, ConfigError), match=r"adapters of .*(visual|vision_tower).* are not supported"):
        served.add(engine, "0", served.pictures.prompt(5), lora_request=LoRARequest("t", 1, str(tmp_path / "tower")))

"""OpenVINO GenAI's continuous batching, with a model that optimum-intel exports once."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

_PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class Engine:
    num_warm_up = None

    def __init__(self, checkpoint: Path, cache_dir: Path, weights: str = "float32", **options: Any) -> None:
        self.note = f"ContinuousBatchingPipeline, prefix caching, {weights} weights"
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in {"cache_size": 2, "enable_prefix_caching": True, **options}.items():  # cache_size: GB
            setattr(scheduler, name, value)
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        model = _export(checkpoint, cache_dir / "openvino")
        if weights != "float32":
            model = _compressed(model, weights)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", _PRECISION)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [_greedy(n) for n in output_lens])
        return [result.m_generation_ids[0] for result in results]


def _greedy(num_tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, num_tokens
    return config


def _export(checkpoint: Path, directory: Path) -> Path:
    """Return the checkpoint in OpenVINO's float32 format."""
    if not (directory / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM  # noqa: PLC0415 - imports torch, which the pipeline does not need

        model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(directory)
    return directory


def _compressed(directory: Path, mode: str) -> Path:
    """Return a copy of an exported model with 8- or 4-bit matrices, including embedding and head."""
    out = directory.with_name(f"{directory.name}-{mode.lower()}")
    if not (out / "openvino_model.xml").exists():
        import nncf  # noqa: PLC0415 - imports torch, which the pipeline does not need

        options = {"group_size": 64, "all_layers": True} if mode.startswith("INT4") else {}
        model = openvino.Core().read_model(directory / "openvino_model.xml")
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode[mode], **options)
        shutil.copytree(directory, out, ignore=shutil.ignore_patterns("openvino_model.*"))
        openvino.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
    return out

"""OpenVINO GenAI's pipeline for pictures, with a model that optimum-intel exports once."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from numpy.typing import NDArray

_PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class Engine:
    num_warm_up = None

    def __init__(self, checkpoint: Path, cache_dir: Path) -> None:
        self.note = "VLMPipeline, float32 weights"
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        self._pipeline = openvino_genai.VLMPipeline(_export(checkpoint, cache_dir / "openvino"), "CPU", **_PRECISION)

    def describe(self, prompt: str, pixels: NDArray[np.uint8], num_tokens: int) -> str:
        config = openvino_genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, num_tokens
        config.apply_chat_template = False
        text: str = self._pipeline.generate(prompt, [openvino.Tensor(pixels)], config).texts[0]
        return text


def _export(checkpoint: Path, directory: Path) -> Path:
    """Return the checkpoint in OpenVINO's float32 format."""
    if not (directory / "openvino_language_model.xml").exists():
        from optimum.exporters.openvino import main_export  # noqa: PLC0415 - imports torch
        from optimum.intel import OVConfig  # noqa: PLC0415

        exact: Any = OVConfig(dtype="fp32")
        main_export(checkpoint, directory, task="image-text-to-text", ov_config=exact, convert_tokenizer=True)
    return directory

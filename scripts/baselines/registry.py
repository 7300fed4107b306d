"""Registry of engines, with their interpreters and commands."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class EngineSpec:
    """One configuration of one engine.

    Attributes:
        adapter: module in this package with its Engine.
        package: package that an interpreter needs to run it; also its name in `--python`.
        options: keyword arguments of the Engine.
        preload: libraries in the interpreter's environment to preload, according to the engine's documentation.
    """

    adapter: str
    package: str
    options: Mapping[str, Any] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


_OPENMP = ("lib/libiomp5.so",)

ENGINES = {
    "jaxserve": EngineSpec("with_jaxserve", "jaxserve"),
    "jaxserve-int8": EngineSpec("with_jaxserve", "jaxserve", {"quantization": "int8"}),
    "jaxserve-int4": EngineSpec("with_jaxserve", "jaxserve", {"quantization": "int4"}),
    "vllm": EngineSpec("with_vllm", "vllm", preload=_OPENMP),
    "vllm-eager": EngineSpec("with_vllm", "vllm", {"enforce_eager": True}, preload=_OPENMP),
    "openvino": EngineSpec("with_openvino", "openvino_genai"),
    "openvino-int8": EngineSpec("with_openvino", "openvino_genai", {"weights": "INT8_ASYM"}),
    "openvino-int4": EngineSpec("with_openvino", "openvino_genai", {"weights": "INT4_SYM"}),
    "ctranslate2": EngineSpec("with_ctranslate2", "ctranslate2"),
    "llama.cpp": EngineSpec("with_llama_cpp", "llama_cpp"),
    "llama.cpp-q8_0": EngineSpec("with_llama_cpp", "llama_cpp", {"file_type": "Q8_0"}),
    "llama.cpp-q4_0": EngineSpec("with_llama_cpp", "llama_cpp", {"file_type": "Q4_0"}),
    "transformers": EngineSpec("with_transformers", "transformers"),
    "transformers-continuous": EngineSpec("with_transformers_continuous", "transformers"),
}

PICTURE_ENGINES = {
    "jaxserve": EngineSpec("with_jaxserve", "jaxserve", {"skip_tokenizer_init": False, "compile_ahead": "minimal"}),
    "openvino": EngineSpec("with_openvino_pictures", "openvino_genai"),
}


def find_python(spec: EngineSpec, pythons: Mapping[str, str]) -> str | None:
    """Return an engine's interpreter: the one given for its package, or this one if it has the package."""
    if spec.package in pythons:
        return pythons[spec.package]
    needed = (spec.package, "torch") if spec.package == "transformers" else (spec.package,)
    return sys.executable if all(map(find_spec, needed)) else None


def worker_command(spec: EngineSpec, python: str, checkpoint: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command of a worker process; its converted checkpoint is kept next to the original."""
    cache = checkpoint.with_name(f"{checkpoint.name}.baselines")
    arguments = [spec.adapter, str(checkpoint), str(cache), json.dumps({**spec.options, **options})]
    return [python, "-m", "baselines.worker", *arguments]


def worker_environment(spec: EngineSpec | None = None, python: str = sys.executable) -> dict[str, str]:
    """Return this environment, with the source tree first, hubs offline, and the preloads of `spec`."""
    path = [str(SCRIPTS), str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "TQDM_DISABLE": "1"}
    root = Path(python).absolute().parent.parent
    preload = [str(root / name) for name in (spec.preload if spec else ()) if (root / name).exists()]
    preloaded = {"LD_PRELOAD": os.pathsep.join(preload)} if preload else {}
    return {**os.environ, **offline, **preloaded, "PYTHONPATH": os.pathsep.join(path)}

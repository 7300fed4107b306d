"""Parity: an engine here chooses transformers' ids, with the same weights, in float32."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from device_report import invariants
from device_report import machine as machines
from device_report.kernels import KERNELS
from device_report.points import Figures, Point, UnavailableError
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, Problem

machine = machines.with_jax

PROMPT_LEN, OUTPUT_LEN = 100, 48
STD = 0.08  # standard deviation of the weights, so that logits differ by more than rounding
TOLERANCE = 1e-3  # maximum margin below the most likely id: float32 ties


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield one point: several simultaneous requests, compared with transformers one by one."""
    settings = {"requests": 2 if dry_run else 8, "output_len": 6 if dry_run else OUTPUT_LEN}
    yield Point("transformers ids", settings, partial(measure, device, *settings.values()))


def measure(device: str, num_requests: int, output_len: int) -> Figures:
    """Return the largest margin of chosen ids below transformers' most likely ones after the same ids."""
    rng = random.Random(3)
    vocab_size = invariants.MODEL["vocab_size"]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(PROMPT_LEN - 9 * row)] for row in range(num_requests)]
    with TemporaryDirectory() as directory:
        model = _transformers_model()
        model.save_pretrained(directory)
        engine = _engine(device, directory)
    outputs = invariants.generate(engine, prompts, output_len)
    leads = [_lead(model, prompt, x.outputs[0].token_ids) for prompt, x in zip(prompts, outputs, strict=True)]
    return {
        "backend": engine.replicas[0].executor.programs.lowering.backend,
        "num_requests": num_requests,
        "num_equal": leads.count(0.0),
        "max_lead": max(leads),
        "passed": max(leads) <= TOLERANCE,
    }


def _transformers_model() -> Any:
    """Return transformers' model on the host, whose float32 is exact."""
    try:
        import torch  # noqa: PLC0415 - may be missing
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(f"transformers: {error}") from None
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**invariants.MODEL, **ids, initializer_range=STD, dtype="float32")
    return transformers.LlamaForCausalLM(config).eval()


def _engine(device: str, directory: str) -> DrivenEngine:
    page_size, model = 16, invariants.MODEL
    num_heads = model["num_attention_heads"]
    heads = Heads(model["num_key_value_heads"], model["hidden_size"] // num_heads)
    problem = Problem(heads, num_heads, page_size, jnp.dtype("float32"), jax.default_backend())
    config = EngineConfig(
        model=directory,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        page_size=page_size,
        num_pages=256,
        attention_backend=KERNELS[device].served(problem),
        multi_step=1,
        compile_ahead="minimal",
        compilation_cache_dir=None,
    )
    return DrivenEngine(config)


def _lead(model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """Return the most likely id's largest margin over the chosen one; 0 if `generate` gives the same ids."""
    import torch  # noqa: PLC0415 - as above, where its absence is told

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())

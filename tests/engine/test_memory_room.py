"""Options that allocate more memory than there is: one line with the bytes needed and the bytes free."""

import re
from typing import Any

import checkpoints
import jax
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.assembly import memory
from jaxserve.assembly.build import naming_exhaustion
from jaxserve.assembly.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.offline.llm import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    checkpoints.write_checkpoint(path, "llama", vocab_size=64, bos_token_id=0, eos_token_id=1)
    return str(path)


@pytest.mark.parametrize("start", [Engine, lambda config: LLM(**{k: v for k, v in vars(config).items() if v})])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_pages": 2_000_000_000}, "num_pages"),
        ({"max_num_seqs": 2_000_000_000}, "max_num_seqs or max_model_len"),
        ({"max_num_batched_tokens": 2_000_000_000_000, "max_num_seqs": 4}, "max_num_batched_tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_a_one_line_error(
    model: str, options: dict[str, Any], named: str, start: Any
) -> None:
    with pytest.raises(ConfigError) as found:
        start(EngineConfig(model, skip_tokenizer_init=True, **options))
    text = str(found.value)
    assert "\n" not in text
    needed, part, free = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+)(?: bytes free|, got)", text))
    assert needed >= part > free > 0
    assert text.endswith(f"bytes free; lower {named}")


def test_a_byte_too_few_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model, skip_tokenizer_init=True, num_pages=64, max_num_seqs=4, max_num_batched_tokens=16)
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    with pytest.raises(ConfigError) as found:
        Engine(config)
    needed = int(re.findall(r"must have ([\d,]+) bytes", str(found.value))[0].replace(",", ""))
    page = needed // 64
    assert page > 0
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=f"got {needed - 1:,} bytes free"):
        Engine(config)


def test_an_exhausted_device_is_a_one_line_error() -> None:
    with (
        pytest.raises(ConfigError, match=r"^a device has run out of memory .* free: RESOURCE_EXHAUSTED: 5 GiB; lower"),
        naming_exhaustion(EngineConfig()),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GiB\nand more")
    with pytest.raises(jax.errors.JaxRuntimeError), naming_exhaustion(EngineConfig()):
        raise jax.errors.JaxRuntimeError("INTERNAL")

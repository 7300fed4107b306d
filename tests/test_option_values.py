"""Options that are JSON on a command line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.api.option_values import read_object, read_targets, read_tenant_weights
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.quantizer.calibration import calibration_sequences
from tests import tiny_tokenizers

READERS: dict[str, Callable[[str], object]] = {
    "hf_overrides": lambda text: read_object("hf_overrides", text),
    "tenant_weights": read_tenant_weights,
    "target_ttft_ms": lambda text: read_targets(text, None),
    "speculative_config": SpeculationConfig.from_value,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", '{"a": 1'])
def test_faults_are_named_in_a_short_line(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be") as info:
        READERS[name](text)
    assert len(str(info.value)) < 500
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("value", [None, "null", " null\n"])
def test_null_turns_speculative_decoding_off(value: str | None) -> None:
    assert SpeculationConfig.from_value(value) is None


def test_nested_lines_of_a_calibration_file(tmp_path: Path) -> None:
    tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level())
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 must be JSON, but: "):
        calibration_sequences(tmp_path, str(tmp_path / "a.jsonl"), num_sequences=1, sequence_len=64, vocab_size=100)

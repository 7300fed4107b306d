"""Readers of traces: each format gives the same requests, and a malformed line is named."""

import gzip
import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.simulator.traces import TracedRequest, read_trace

MOONCAKE = '{"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [0, 4]}\n'
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,700,3\n1.5,8,1\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5000000,700,3\n2023-11-16 18:15:48.0000000,8,1\n"
PLAIN = (
    '{"arrival_s": 0, "prompt_len": 700, "output_len": 3}\n'
    '{"arrival_s": 1.5, "prompt_len": 8, "output_len": 1, "blocks": [1], "block_len": 8, "tenant": "a"}\n'
)


def read(path: Path, text: str, **options) -> list[TracedRequest]:
    path.write_text(text)
    return list(read_trace(path, **options))


def test_a_block_id_per_512_tokens_names_a_prompt(tmp_path: Path) -> None:
    assert read(tmp_path / "trace", MOONCAKE) == [TracedRequest(1.5, 700, 3, [0, 4], 512)]
    (tmp_path / "zipped").write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(list(read_trace(tmp_path / "zipped"))) == 1


GUIDELLM = json.dumps(
    {
        "benchmarks": [
            {
                "requests": {
                    "successful": [
                        {"start_time": 1001.5, "prompt_tokens": 8, "output_tokens": 1},
                        {"start_time": 1000.0, "prompt_tokens": 700, "output_tokens": 3},
                    ]
                }
            }
        ]
    },
    indent=1,
)
WORKLOAD = json.dumps(
    {
        "name": "a",
        "requests": [{"prompt_len": 700, "output_len": 3}, {"prompt_len": 8, "output_len": 1, "arrival_s": 1.5}],
    }
)


@pytest.mark.parametrize("text", [VIDUR, AZURE, PLAIN, GUIDELLM, WORKLOAD])
def test_formats_agree_on_lengths_and_times(tmp_path: Path, text: str) -> None:
    first, second = read(tmp_path / "trace", text)
    assert (first.prompt_len, first.output_len, second.prompt_len, second.output_len) == (700, 3, 8, 1)
    assert second.arrival_s - first.arrival_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json\n", "Expecting value"),
        (MOONCAKE.replace('"output_length": 3, ', ""), "'output_length' is missing"),
        (MOONCAKE.replace("700", "7.5"), "integers"),
        (MOONCAKE.replace("700", "0"), "at least 1 token"),
        (MOONCAKE.replace("[0, 4]", "[0]"), "must cover the prompt of 700"),
        (MOONCAKE.replace("1500", "3"), "sorted by arrival"),
    ],
)
def test_a_malformed_line_is_named_by_its_number_and_may_be_skipped(tmp_path: Path, line: str, what: str) -> None:
    text = MOONCAKE + line + MOONCAKE
    with pytest.raises(ConfigError, match=rf"line 2: .*{what}"):
        read(tmp_path / "trace", text)
    messages: list[str] = []
    assert len(read(tmp_path / "trace", text, on_bad_line=messages.append)) == 2
    assert ["line 2" in message for message in messages] == [True]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", json.dumps({"a": 1}) + "\n", "{\n"])
def test_an_unknown_format_is_refused_with_those_that_are_known(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"hash_ids.*event log"):
        read(tmp_path / "trace", text)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "missing"))

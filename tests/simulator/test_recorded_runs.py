"""An engine's recorded run: its log replays to the same plans, and is a trace for the simulator."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.event_log import replay_log
from jaxserve.errors import ConfigError
from jaxserve.tools.simulator.simulation import Simulation
from jaxserve.tools.simulator.step_times import ProgramTimes, read_step_rates
from jaxserve.tools.simulator.traces import read_log_sizes, read_trace

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "num_pages": 40}


@pytest.mark.long
def test_an_engines_log_replays_to_the_same_plans_and_is_a_trace(tmp_path: Path) -> None:
    path, num_steps = tmp_path / "events", 0
    config = EngineConfig(
        event_log=str(path), compile_ahead="minimal", target_ttft_ms=1000, target_itl_ms=1000, **OPTIONS
    )
    with closing(DrivenEngine(config)) as engine:
        for index in range(9):
            prompt = [*range(40), *range(index, 50)]
            engine.add_request(str(index), prompt, SamplingParams(max_tokens=8 + index, ignore_eos=True))
            for _ in range(index):
                engine.step()
        while engine.has_unfinished():
            engine.step()
        schedule, num_steps, cached = engine.schedule, engine.stats.num_dispatches, engine.stats.num_cached_tokens
    assert replay_log(path) == num_steps > 20
    assert read_log_sizes(str(path))["max_num_batched_tokens"] == OPTIONS["max_num_batched_tokens"]
    trace = list(read_trace(path))
    totals = Simulation(schedule, ProgramTimes({1: 0.01, 32: 0.02}, 0.0, 0.0)).run(trace)
    assert (totals.num_ended, totals.num_output_tokens) == (9, sum(8 + index for index in range(9)))
    assert cached > 0
    assert totals.num_cached_tokens > 0


def test_sizes_are_read_from_compressed_logs_too(tmp_path: Path) -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "page_size": 8}
    line = json.dumps(sizes | {"num_pages": 40}).encode() + b"\n"
    for content in (line, gzip.compress(line)):
        (tmp_path / "log").write_bytes(content)
        assert read_log_sizes(str(tmp_path / "log")) == sizes
    for content in (b"{}\n", gzip.compress(line)[:12]):
        (tmp_path / "log").write_bytes(content)
        with pytest.raises(ConfigError, match="must be an engine's event log"):
            read_log_sizes(str(tmp_path / "log"))


def test_times_by_program_are_read_and_count_attention(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"program_s": {"8": 0.5, "2": 0.25}, "score_s": 0.001, "context_s": 0.01}))
    times = read_step_rates(str(path))
    assert times.steps_s([3, 5], [1, 1], 2) == pytest.approx([0.25 + 0.01 + 0.1, 0.25 + 0.012 + 0.12])
    assert times.steps_s([10], [3]) == pytest.approx([0.5 + 0.036 + 0.13])
    assert times.steps_s([0], [100])[0] == pytest.approx(0.5 + 5.05 + 1.0)
    for text in ("[]", '{"program_s": {}}', '{"program_s": {"2": -1}, "score_s": 0, "context_s": 0}', '{"a": 1}', "1"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"prefill_step_s.*program_s"):
            read_step_rates(str(path))

"""Beams of a model over several devices: those of one device."""

from pathlib import Path

import pytest

from jaxserve import LLM, BeamSearchParams
from tests.e2e.workloads import tokens
from tests.sharded.devices.sizes import SIZES

pytestmark = pytest.mark.full


def test_beams_are_those_of_one_device(model: Path) -> None:
    found = []
    for num_devices in (1, 2):
        with LLM(str(model), tensor_parallel_size=num_devices, **SIZES | {"multi_step": 1}) as llm:
            outputs = llm.beam_search([tokens(9, 1), tokens(14, 2)], BeamSearchParams(beam_width=3, max_tokens=7))
            found.append([beam.tokens for output in outputs for beam in output.sequences])
            assert llm.engine.stats.num_compiles == 0
    assert found[0] == found[1]

"""Options of XLA, which come and go with its versions."""

import logging

import pytest

from jaxserve.execution.lowering import known_options


@pytest.mark.parametrize(("name", "level"), [("xla_cpu_no_such", logging.INFO), ("xla_gpu_no_such", logging.WARNING)])
def test_an_option_that_xla_does_not_have_is_left_out(caplog: pytest.LogCaptureFixture, name: str, level: int) -> None:
    """On CPUs options change the time of compilation alone, of which nobody needs a warning."""
    known: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert known_options({name: False, **known}) == known
    (record,) = caplog.records
    assert record.levelno == level
    assert f"{name}=False" in record.message

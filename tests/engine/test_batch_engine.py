"""The engine of a batch over threads: what ends is returned once, whatever else fails."""

from typing import Any

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.growing_outputs import RequestGroup
from jaxserve.offline.llm import LLM
from synthetic.null_device import null_engine
from tests.waiting import until


def test_served_requests_are_returned_before_failures_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    append = RequestGroup.append

    def failing(group: RequestGroup, *args: Any) -> Any:
        if group.request_id.startswith("fails"):
            raise ValueError("no text for this token")
        return append(group, *args)

    monkeypatch.setattr(RequestGroup, "append", failing)
    llm = LLM.over(
        null_engine(1, max_model_len=64, max_num_seqs=4, page_size=16, num_pages=16, compile_ahead="minimal")
    )
    engine, returned, errors = llm.batch_engine(), list[str](), list[str]()
    names = ["ends 0", "fails 0", "fails 1", "ends 1"]
    for count, name in enumerate(names, start=1):
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=1))
        until(lambda count=count: engine._ended.qsize() == count)
    while engine.has_unfinished():
        try:
            returned += [output.request_id for output in engine.wait()]
        except RuntimeError as error:
            errors.append(str(error))
    assert sorted(returned) == ["ends 0", "ends 1"]
    assert ["no text" in error for error in errors] == [True, True]
    llm.close()

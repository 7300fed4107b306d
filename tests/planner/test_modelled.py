"""Tests of the scheduler over a simulated device: times equal the roofline's, and short prompts overtake a long one."""

import dataclasses

import pytest

from jaxserve.execution.executor import Executor
from jaxserve.schedule_config import ScheduleConfig
from simulate import modelled, serve

SIZES = ScheduleConfig(256, 2048, max_model_len=131_072, page_size=16, num_pages=20_000, few_programs=True)


def test_it_is_an_executor() -> None:
    assert isinstance(modelled("llama-3.1-8b", "h200", SIZES)[1], Executor)


@pytest.mark.parametrize("num_tokens", [100, 2048, 9000])
def test_a_lone_prompt_takes_what_the_roofline_says(num_tokens: int) -> None:
    arch, executor = modelled("llama-3.1-8b", "h200", SIZES)
    ((steps, seconds),) = serve(arch, executor, [num_tokens], num_output=1)
    assert steps == -(-num_tokens // 2048)
    assert seconds * 1e3 == pytest.approx(executor._roofline.ttft_ms(num_tokens))


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    first_come_first = dataclasses.replace(SIZES, long_prefill_token_threshold=131_072)
    lengths = [32_000, *[100] * 20]
    (long, *short), (long_before, *short_before) = (
        serve(*modelled("llama-3.1-8b", "h200", sizes), lengths, num_output=4) for sizes in (SIZES, first_come_first)
    )
    assert max(steps for steps, _ in short) <= 3
    assert min(steps for steps, _ in short_before) > 15
    assert long[0] <= long_before[0] + 10

"""Tests of the scheduler over a simulated device: times equal the roofline's, and short prompts overtake a long one."""

import pytest

from jaxserve.scheduling.executor_protocol import Executor
from simulate import modelled, serve


def test_it_is_an_executor() -> None:
    assert isinstance(modelled("llama-3.1-8b", "h200")[1], Executor)


@pytest.mark.parametrize("num_tokens", [100, 2048, 9000])
def test_a_single_prompt_takes_the_roofline_time(num_tokens: int) -> None:
    arch, executor = modelled("llama-3.1-8b", "h200")
    ((steps, seconds),) = serve(arch, executor, [num_tokens], num_output=1)
    assert steps == -(-num_tokens // 2048)
    assert seconds * 1e3 == pytest.approx(executor._rooflines[0].ttft_ms(num_tokens))


@pytest.mark.parametrize(
    ("model", "target", "token_elements"),
    [
        ("llama-3.1-8b", "h200", 32 * 2 * 8 * 128),
        ("llama-3.1-8b", "h200x4", 32 * 2 * 2 * 128),
        ("deepseek-v2-lite", "h200", 27 * (512 + 64)),
        ("gemma-3-27b", "h200", 62 * 2 * 16 * 128),
        ("gemma-4-31b", "h200", 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512),
        ("qwen3.5-9b", "h200", 8 * 2 * 4 * 256),
    ],
)
def test_token_bytes_follow_from_the_layers_that_store_them(model: str, target: str, token_elements: int) -> None:
    """Bytes of a token in bfloat16: heads of one or two sizes, latents, states; the scheduler knows of windows."""
    arch, executor = modelled(model, target)
    assert executor.costs.kv_token_bytes == 2 * token_elements
    assert executor.schedule.windows == arch.kv_layout.windows
    assert (executor.schedule.num_snapshots is None) == (arch.state is None)
    (long_steps, long_s), (short_steps, short_s) = serve(arch, executor, [5000, 100], num_output=2)
    assert 1 <= short_steps <= long_steps
    assert 0 < short_s <= long_s


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    lengths, first_come_first = [32_000, *[100] * 20], {"long_prefill_token_threshold": 131_072}
    (long, *short), (long_before, *short_before) = (
        serve(*modelled("llama-3.1-8b", "h200", **options), lengths, num_output=4) for options in ({}, first_come_first)
    )
    assert max(steps for steps, _ in short) <= 3
    assert min(steps for steps, _ in short_before) > 15
    assert long[0] <= long_before[0] + 10

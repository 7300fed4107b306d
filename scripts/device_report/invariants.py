"""A request's tokens depend neither on concurrent requests nor on how they run: on this device, in bfloat16.

Sums in bfloat16 depend on a matmul's shape, and different shapes are computed differently. Outputs must therefore be
equal up to the first token at which the two most likely ones were nearly equal, and log probabilities before that must
agree within a tolerance.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache, partial

from device_report.points import Figures, Point
from device_report.served import Served
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine

MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
STD_FACTOR = 4  # so that logits differ by more than rounding
TOLERANCE = 0.1  # limit on log probability errors: several bfloat16 roundings at logits around 5
NUM_REQUESTS = 8
PROMPT_LEN, OUTPUT_LEN = 150, 32
WHOLE, CHUNK = 256, 32  # tokens per step

Prompts = Sequence[list[int]]


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield one point per invariant; with few requests in a dry run."""
    num_requests, output_len = (2, 3) if dry_run else (NUM_REQUESTS, OUTPUT_LEN)
    rng = random.Random(11)
    prompts = [[rng.randrange(3, 512) for _ in range(PROMPT_LEN - 7 * row)] for row in range(num_requests)]
    for name, compare in (
        ("batched == alone", batched_is_alone),
        ("chunked == whole", chunked_is_whole),
        ("prefix-cached == cold", cached_is_cold),
    ):
        yield Point("invariant", {"case": name}, partial(compare, device, prompts, output_len))


def batched_is_alone(device: str, prompts: Prompts, output_len: int) -> Figures:
    """Compare all requests together, in chunks within one budget, with each request on an empty engine."""
    engine = _engine(device, WHOLE)
    alone = [generate(engine, [prompt], output_len)[0] for prompt in prompts]
    return _agreement(generate(engine, prompts, output_len), alone)


def chunked_is_whole(device: str, prompts: Prompts, output_len: int) -> Figures:
    """Compare chunked prompts with whole ones."""
    whole, chunked = ([generate(_engine(device, size), [p], output_len)[0] for p in prompts] for size in (WHOLE, CHUNK))
    return _agreement(chunked, whole)


def cached_is_cold(device: str, prompts: Prompts, output_len: int) -> Figures:
    """Repeat each prompt."""
    engine = _engine(device, WHOLE)
    cold = [generate(engine, [prompt], output_len)[0] for prompt in prompts]
    warm = generate(engine, prompts[-1:], output_len, reset=False)
    figures = _agreement(warm, cold[-1:])
    return {**figures, "passed": figures["passed"] and warm[0].num_cached_tokens > 0}


@cache
def _engine(device: str, budget: int) -> DrivenEngine:
    sizes = {"max_model_len": 256, "max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": budget}
    return Served(device, MODEL, STD_FACTOR, num_pages=256, **sizes).engine(multi_step=1)


def generate(engine: DrivenEngine, prompts: Prompts, output_len: int, *, reset: bool = True) -> list[RequestOutput]:
    """Generate the most likely tokens for each prompt, with their log probabilities; cold unless the cache is kept."""
    if reset:
        engine.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=2)
    outputs = [engine.add_request(str(row), prompt, params) for row, prompt in enumerate(prompts)]
    while engine.has_unfinished():
        engine.step()
    engine.step()
    return outputs


def _agreement(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> Figures:
    compared = [_compare(a, b) for a, b in zip(found, expected, strict=True)]
    worst = max(difference for difference, _ in compared)
    return {
        "num_requests": len(found),
        "num_equal": sum(is_equal for _, is_equal in compared),
        "max_logprob_difference": worst if math.isfinite(worst) else None,
        "passed": worst <= TOLERANCE,
    }


def _compare(found: RequestOutput, expected: RequestOutput) -> tuple[float, bool]:
    """Return the largest log probability difference, and whether all tokens are equal.

    If a token differs, the difference is that between both candidates in the reference run.
    """
    (a,), (b,) = found.outputs, expected.outputs
    assert a.logprobs is not None
    assert b.logprobs is not None
    worst = 0.0
    for id_a, id_b, p, q in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
        if id_a != id_b:
            lead = p[id_a].logprob - p[id_b].logprob if id_b in p else math.inf
            return max(worst, lead), False
        worst = max(worst, abs(p[id_a].logprob - q[id_b].logprob))
    return worst, True

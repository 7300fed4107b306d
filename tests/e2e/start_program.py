"""Start an engine in a process of its own, serve, refuse a wrong type; print what was compiled and generated.

Two more lines tell when runners are closed and when finalizers run, at the end of the process.

`python start_program.py MODEL CACHE_DIR`; run as a program so that nothing of the test suite is in it.
"""

import collections
import json
import sys
import weakref
from collections.abc import Callable
from functools import partial

import jax

from jaxserve import LLM, RequestError, SamplingParams
from jaxserve.execution import runner

WRONG_TYPES = [5, None, 1.5, [1.5], ["a", "b"], [[3, 4], 5], [None], {"prompt": 7}, {"prompt_token_ids": "ab", "x": 1}]


def main(model: str, cache_dir: str) -> LLM:
    """Return what serves, to be there still when the process ends."""
    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: events.update([event.rsplit("/", 1)[-1]])
    )
    sizes = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_pages": 8}
    llm = LLM(model, compilation_cache_dir=cache_dir, compile_ahead="minimal", forbid_compiles=True, **sizes)
    start = dict(events)
    everything = SamplingParams(
        seed=1,
        temperature=0.9,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        max_tokens=5,
        min_tokens=2,
        logprobs=20,
        prompt_logprobs=20,
        presence_penalty=1,
        logit_bias={4: 1.0},
        stop="zz",
        n=2,
    )
    outputs = llm.generate(["Once upon", "a time"], [everything, SamplingParams(temperature=0)], use_tqdm=False)
    refused = 0
    for prompt in WRONG_TYPES:
        try:
            llm.engine.reader.read("bad", prompt, SamplingParams())
        except RequestError:
            refused += 1
    result = {
        "programs": start.get("backend_compile_duration", 0),
        "compiled_while_serving": llm.engine.stats.num_compiles,
        "token_ids": [o.token_ids for output in outputs for o in output.outputs],
        "refused": refused == len(WRONG_TYPES),
    }
    print(json.dumps(result))
    return llm


def tell_and_close(close_all: Callable[[], None]) -> None:
    print("closed")
    close_all()


if __name__ == "__main__":
    runner._close_all = partial(tell_and_close, runner._close_all)
    served = main(*sys.argv[1:])
    weakref.finalize(served, print, "finalized")

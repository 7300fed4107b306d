"""The compiled step: the pool is updated in place, no array as large is copied, and padding is inert."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import jax
import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.packer import StepUpload
from jaxserve.execution.runner import Runner
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from tests.e2e.workloads import Job, generate, run, tokens
from tests.parameters import mainly
from tests.soon_compiled import as_shipped

Start = Callable[..., DrivenEngine]


@pytest.mark.parametrize("multi_step", mainly([True], False))
@pytest.mark.parametrize("family", mainly(["llama"], "gemma4"))
def test_pool_is_updated_in_place(start: Start, tmp_path: Path, family: str, multi_step: bool) -> None:
    """Temporaries are a few times the logits and activations of 16 tokens beside a pool of 100 MB.

    Layers of Gemma 4 with heads of two sizes see the pool in two shapes.
    """
    if family == "gemma4":
        checkpoints.write_checkpoint(tmp_path, family)
    own = {"model": str(tmp_path)} if family == "gemma4" else {}
    lowering = start(multi_step=5, **own).replicas[0].executor.programs.lowering
    lowering = dataclasses.replace(lowering, schedule=dataclasses.replace(lowering.schedule, num_pages=50_000))
    pool = lowering.abstract_state.kv_pages
    with as_shipped():
        compiled = (lowering.step(4, 5) if multi_step else lowering.step(16)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size * pool.dtype.itemsize > 100e6
    assert memory.temp_size_in_bytes < 1e6
    shape = ",".join(map(str, pool.shape))
    makers = re.findall(rf"= f32\[{shape}\]\S* ([a-z-]+)\(", compiled.as_text())
    assert makers, "the pool is in the program"
    assert not {"copy", "copy-start", "transpose", "concatenate", "pad"} & set(makers)


@pytest.mark.parametrize("bucket", [1, 16])
def test_tables_by_slot_are_not_copied(start: Start, bucket: int) -> None:
    """Slot tables grow with max_num_seqs and max_model_len or vocabulary; a step touches few of their elements."""
    runner = start().replicas[0].executor
    [program] = (each.as_text() for each in runner.programs.table[StepShape(bucket)])
    state = runner.programs.lowering.abstract_state
    for table in (state.slots.token_history, state.slots.token_counts, state.sequences.page_table):
        shape = rf"s32\[{table.shape[0]},{table.shape[1]}\]"
        assert re.search(rf"= {shape}\S* parameter", program)
        assert not re.search(rf"= {shape}\S* copy", program)


def launch_upload(
    runner: Runner, launch: Callable[..., Any], plan: StepPlan, program: StepShape, upload: StepUpload
) -> Any:
    """Launch a step that has been packed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.packer, "pack", lambda *_: upload)
        return launch(plan, program)


class Twin:
    """Runner of each step twice on equal states, the second time with garbage in all padding of the batch."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.runner, self.schedule = engine.replicas[0].executor, engine.schedule
        self.launch = self.runner.launch
        self.rng = np.random.default_rng(0)
        self.num_padded = self.num_multi_steps = 0

    def launch_twice(self, plan: StepPlan, program: StepShape) -> Any:
        bucket = program.num_tokens
        self.num_multi_steps += plan.num_steps > 1
        before, upload = jax.tree.map(np.array, self.runner.state), self.runner.packer.pack(plan, bucket)
        clean = launch_upload(self.runner, self.launch, plan, program, upload).result()
        after = jax.tree.map(np.array, self.runner.state)
        self.runner.state = jax.device_put(before)
        spoilt = upload._replace(blob=self._spoil(upload.blob, bucket))
        handle = launch_upload(self.runner, self.launch, plan, program, spoilt)
        fields = BatchLayout.from_config(self.schedule, bucket).blob.views(upload.blob)
        num_rows = fields["num_rows"].item()
        live = {"row": num_rows, "token": int(fields["cu_q_lens"][num_rows])}
        self._compare(clean, handle.result(), live)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, self.runner.state), after)
        return handle

    def _spoil(self, blob: np.ndarray, bucket: int) -> np.ndarray:
        spoilt = blob.copy()
        to = BatchLayout.from_config(self.schedule, bucket).blob.views(spoilt)
        num_rows = to["num_rows"].item()
        num_tokens = int(to["cu_q_lens"][num_rows])
        self.num_padded += bucket - num_tokens
        self._fill(to["token_ids"][num_tokens:])
        self._fill(to["cu_q_lens"][num_rows + 1 :])
        for name in ("slot", "max_new", "next_ids"):
            self._fill(to[name][num_rows:])
        table_row, column, page = to["pages"]
        padding = table_row >= self.schedule.max_num_seqs * self.schedule.kv_groups.size
        for entries in (column, page):
            entries[padding] = self.rng.integers(-(2**31), 2**31, int(padding.sum()))
        return spoilt

    def _fill(self, view: np.ndarray) -> None:
        """Return large, small and negative values, and bits that are NaN and infinity as floats."""
        kinds = [self.rng.integers(-(2**31), 2**31, view.shape), self.rng.integers(-200, 200, view.shape)]
        kinds.append(self.rng.choice([0x7FC00000, 0x7F800000, 0x3F800000, 1, 0], view.shape))
        view[...] = self.rng.choice(np.stack(kinds), axis=0) if view.size else 0

    def _compare(self, clean: Any, spoilt: Any, live: dict[str, int]) -> None:
        rows, num_tokens = live["row"], live["token"]
        np.testing.assert_array_equal(spoilt.num_tokens[:rows], clean.num_tokens[:rows])
        assert spoilt.sampled(rows) == clean.sampled(rows)
        num_tokens_of_rows = rows * (len(clean.logprobs.rank) // len(clean.token_ids)) if clean.logprobs else 0
        for name, count in (("logprobs", num_tokens_of_rows), ("prompt_logprobs", num_tokens)):
            a, b = getattr(spoilt, name), getattr(clean, name)
            jax.tree.map(lambda x, y, n=count: np.testing.assert_array_equal(x[:n], y[:n]), a, b)


@pytest.mark.parametrize("budget", [16, 64])
def test_padding_is_inert(start: Start, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    engine = start(step_ahead=False, max_num_batched_tokens=budget)
    twin = Twin(engine)
    monkeypatch.setattr(engine.replicas[0].executor, "launch", twin.launch_twice)
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        seed=4,
        max_tokens=6,
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=2,
        repetition_penalty=1.2,
        logit_bias={5: 3.0},
    )
    generate(engine, [tokens(n, n) for n in (19, 2, 5, 9, 1)], params)
    assert twin.num_padded > 50


def test_padding_of_several_steps_is_inert(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(step_ahead=False, multi_step=5)
    twin = Twin(engine)
    monkeypatch.setattr(engine.replicas[0].executor, "launch", twin.launch_twice)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=13, frequency_penalty=0.2, stop_token_ids=[9, 40])
    generate(engine, [tokens(n, n) for n in (19, 2)], params)
    assert twin.num_multi_steps >= 2


@pytest.mark.parametrize("multi_step", [1, 5])
def test_rows_that_have_stopped_compute_nothing(start: Start, monkeypatch: pytest.MonkeyPatch, multi_step: int) -> None:
    """Rows end by a stop id or by their length, although the host goes on to plan tokens for them."""
    engine = start(step_ahead=False, multi_step=multi_step)
    runner, launch, uploads = engine.replicas[0].executor, engine.replicas[0].executor.launch, []

    def launch_and_keep(plan: StepPlan, program: StepShape) -> Any:
        upload = runner.packer.pack(plan, program.num_tokens)
        uploads.append((plan, program, upload._replace(admissions=[], slot_rows=[])))
        return launch_upload(runner, launch, plan, program, upload)

    monkeypatch.setattr(runner, "launch", launch_and_keep)
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=13, stop_token_ids=list(range(20)))
    plain = dataclasses.replace(params, stop_token_ids=None, ignore_eos=True)
    stopped = dataclasses.replace(params, stop_token_ids=list(range(64)), max_tokens=40)
    ways = [stopped, plain, params]
    outputs = run(engine, [Job(tokens(4, n), way) for n, way in enumerate(ways)])
    assert {output.outputs[0].finish_reason for output in outputs[:2]} == {"stop", "length"}
    before = jax.tree.map(np.array, runner.state)
    for upload in uploads[-3:]:
        assert not launch_upload(runner, launch, *upload).result().num_tokens.any()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, runner.state), before)


def test_a_stopped_row_does_not_stop_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(step_ahead=False, multi_step=5)
    launch, num_tokens = engine.replicas[0].executor.launch, []

    def launch_and_count(plan: StepPlan, program: StepShape) -> Any:
        handle = launch(plan, program)
        num_tokens.append(handle.result().num_tokens[: plan.num_rows].tolist())
        return handle

    monkeypatch.setattr(engine.replicas[0].executor, "launch", launch_and_count)
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=40, stop_token_ids=list(range(20)))
    generate(engine, [tokens(4, n) for n in range(3)], params)
    assert any(min(counts) < 5 == max(counts) for counts in num_tokens), num_tokens


@pytest.mark.parametrize("max_model_len", [64, 4096])
def test_the_upload_of_a_step_does_not_grow_with_the_length_of_a_sequence(max_model_len: int) -> None:
    sizes = ScheduleConfig(256, 2048, max_model_len, page_size=16, num_pages=10_000)
    assert BatchLayout.from_config(sizes, 256).blob.size * 4 < 16 * 1024


def test_logprobs_that_no_one_wants_cost_nothing(start: Start) -> None:
    """The sort of their top_k is in a branch, at every size: the entry computation always runs."""
    runner = start().replicas[0].executor
    for bucket in (1, 16):
        [program] = (each.as_text() for each in runner.programs.table[StepShape(bucket)])
        entry = program[program.index("\nENTRY ") :]
        assert "top_k" in program
        assert "top_k" not in entry, bucket

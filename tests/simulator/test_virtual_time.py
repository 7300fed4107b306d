"""The simulator: its times are those of single steps and of the engine's core, and its plans are the engine's."""

from pathlib import Path
from random import Random

import pytest

from jaxserve.core.event_log import EventLog, read_log, replay_log
from jaxserve.core.events import Added
from jaxserve.scheduling.router import Router
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_plan import ONE_STEP, StepChoice, StepPlan
from jaxserve.scheduling.step_time import Rates
from jaxserve.tools.simulator.roofline_times import RooflineTimes
from jaxserve.tools.simulator.simulation import Limits, Simulation
from jaxserve.tools.simulator.step_times import FittedTimes
from jaxserve.tools.simulator.traces import TracedRequest
from simulate import modelled, serve

SIZES = ScheduleConfig(8, 64, 512, 16, 200)
TIMES = FittedTimes(Rates(0.02, 0.01, 0.001, 0.0005))


class SingleSteps:
    """Chooser of one step per plan."""

    def choose(self, scheduler, now_s):
        return ONE_STEP


def random_trace(seed: int, count: int, rate: float) -> list[TracedRequest]:
    draw, now_s, trace = Random(seed), 0.0, []
    for _ in range(count):
        now_s += draw.expovariate(rate)
        family, length = draw.randrange(4), draw.randrange(1, 200)
        blocks = [10 * family + index for index in range(-(-length // 32))]
        trace.append(TracedRequest(now_s, length, draw.randrange(1, 60), blocks, 32, str(family), draw.randrange(2)))
    return trace


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("step_ahead", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(("num_replicas", "rate"), [(1, 1.0), pytest.param(3, 12.0, marks=pytest.mark.long)])
def test_dispatches_of_several_steps_give_the_times_of_single_steps(
    step_ahead: bool, num_replicas: int, rate: float
) -> None:
    """Requests that arrive between two dispatches may find other pages or loads, which the router's ties amplify."""
    trace = [each._replace(blocks=(), priority=0) for each in random_trace(3, 60, rate)]
    several, single = (
        Simulation(SIZES, TIMES, num_replicas, chooser=chooser, step_ahead=step_ahead).run(trace)
        for chooser in (None, SingleSteps())
    )
    assert several.num_dispatches < single.num_dispatches / 1.5
    assert several.num_ended == single.num_ended == 60
    assert several.num_output_tokens == single.num_output_tokens == sum(each.output_len for each in trace)
    assert several.last_s == pytest.approx(single.last_s, rel=0.01)
    for name in ("ttft_s", "itl_s", "latency_s"):
        assert getattr(several, name).count == getattr(single, name).count
        assert getattr(several, name).mean == pytest.approx(
            getattr(single, name).mean, rel=0.005 if num_replicas == 1 else 0.05
        )


def test_equal_traces_give_equal_figures_and_plans(tmp_path: Path) -> None:
    reports = []
    for name in ("a", "b"):
        log = EventLog(tmp_path / name, SIZES)
        simulation = Simulation(SIZES, TIMES, 2, record=log.record)
        reports.append(simulation.run(random_trace(5, 80, 10.0)).report(2, 3.0))
        log.close()
        for replica in simulation.replicas:
            replica.scheduler.check_integrity()
            assert not replica.scheduler.num_pages_used
    assert reports[0] == reports[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert reports[0]["hit_rate"] > 0.2


def test_recorded_plans_replay(tmp_path: Path) -> None:
    """A log has tokens and no page hashes, so it replays as recorded if requests share no prefix."""
    log = EventLog(tmp_path / "log", SIZES)
    trace = [each._replace(blocks=()) for each in random_trace(5, 40, 10.0)]
    Simulation(SIZES, TIMES, record=log.record, shares_prefixes=False).run(trace)
    log.close()
    assert sum(isinstance(event, Added) for event in read_log(tmp_path / "log").events) == 40
    assert replay_log(tmp_path / "log") > 100


def test_many_replicas_route_a_request_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting requests are looked at again only if something has changed for them."""
    routed: list[object] = []
    choose = Router.choose
    monkeypatch.setattr(
        Router, "choose", lambda self, *given, **named: routed.append(given) or choose(self, *given, **named)
    )
    trace = random_trace(7, 600, 400.0)
    totals = Simulation(SIZES, TIMES, 100).run(trace)
    assert totals.num_ended == len(trace)
    assert len(routed) < 2.5 * len(trace)


def test_a_policy_limits_the_prompt_tokens_alongside_decoding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(SingleSteps):
        def choose(self, scheduler: Scheduler, now_s: float) -> StepChoice:
            return ONE_STEP._replace(max_prefill_tokens=8)

    plans: list[StepPlan] = []
    simulation = Simulation(SIZES, TIMES, chooser=Few())
    monitored, update = simulation.replicas[0], simulation.replicas[0].update

    def noted_update() -> object:
        plans.append(monitored.in_flight[0].plan)
        return update()

    monkeypatch.setattr(monitored, "update", noted_update)
    totals = simulation.run([TracedRequest(0.0, 60, 30), TracedRequest(0.1, 200, 5)])
    assert totals.num_ended == 2
    assert plans[0].num_prefill_tokens == 60, "no row decodes"
    assert max(plan.num_prefill_tokens for plan in plans[1:] if plan.num_decode_tokens) == 8


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [TracedRequest(10.0 * index, 320, 2, [*range(7), *[100 + index] * 3], 32) for index in range(3)]
    totals = Simulation(SIZES, TIMES).run(trace)
    assert totals.num_cached_tokens == 2 * 7 * 32
    assert Simulation(SIZES, TIMES, shares_prefixes=False).run(trace).num_cached_tokens == 0


def test_requests_that_do_not_fit_or_find_a_full_queue_are_counted() -> None:
    trace = [TracedRequest(0.0, 600, 1), *[TracedRequest(1.0, 50, 200)] * 40]
    totals = Simulation(SIZES, TIMES, limits=Limits(max_queued_requests=10)).run(trace)
    assert (totals.num_too_long, totals.num_refused, totals.num_ended) == (1, 30, 10)
    totals = Simulation(SIZES, TIMES, limits=Limits(max_queued_tokens=200)).run(trace)
    assert totals.num_ended == 4


@pytest.mark.parametrize(
    ("model", "target"), [("llama-3.1-8b", "h200"), pytest.param("gemma-3-27b", "h200x2", marks=pytest.mark.long)]
)
def test_times_are_the_rooflines(model: str, target: str) -> None:
    arch, executor = modelled(model, target)
    roofline, draw = executor._rooflines[0], Random(1)
    times = RooflineTimes(roofline)
    for _ in range(20):
        starts = [draw.randrange(9000) for _ in range(draw.randrange(1, 100))]
        counts = [1] * len(starts)
        for index, step_s in enumerate(times.steps_s(starts, counts, 3)):
            assert step_s * 1e3 == pytest.approx(roofline.step_ms([start + index for start in starts], counts))
        counts[-1] = draw.randrange(1, 1900)
        assert times.steps_s(starts, counts)[0] * 1e3 == pytest.approx(roofline.step_ms(starts, counts))
    assert RooflineTimes(roofline, 0.5).steps_s([9], [1])[0] == pytest.approx(2 * times.steps_s([9], [1])[0])
    if model == "llama-3.1-8b":  # the engine's core, whose device takes the roofline's time
        lengths = [5000, *[100] * 6, 3000]
        expected = [seconds for _, seconds in serve(arch, executor, lengths, num_output=9)]
        totals = Simulation(executor.schedule, times).run([TracedRequest(0.0, length, 9) for length in lengths])
        assert totals.ttft_s.total == pytest.approx(sum(expected), rel=1e-3)

"""The choice between single steps and several per dispatch, on a simulated clock."""

import math
import random
from statistics import median

import pytest

from jaxserve.api.config import MAX_STEPS, EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.pacer import DISPATCH_S, PLAIN, PROBE_FRACTION, QUIET_DISPATCH_S, QUIET_FRACTION, Pacer
from jaxserve.scheduling.step_plan import StepShape
from jaxserve.scheduling.step_time import SEVERAL, SINGLE, STRETCH, StepTime

PROGRAM = StepShape(1, MAX_STEPS)
TRIAL = 1 + 2 * STRETCH[SINGLE]  # the first of a kind does not follow another
TRIAL_OF_SEVERAL = 1 + 2 * STRETCH[SEVERAL]
PROBE_OF_SINGLE = 1 + STRETCH[SINGLE]
PROBE_OF_SEVERAL = 1 + STRETCH[SEVERAL]
FIRST_PROBES = 500  # dispatches, of which more are probes than later


def max_steps(pacer, program=PROGRAM):
    return pacer.choose(program, (), program.num_rounds)[1]


class Clock:
    """Runs what a pacer asks for: a dispatch costs `dispatch_s` and each of its steps `step_s`; returns the lengths."""

    def __init__(self, pacer, single_s, multi_step_s, dispatch_s=0.0):
        self.pacer, self.now = pacer, 0.0
        self.single_s, self.multi_step_s, self.dispatch_s = single_s, multi_step_s, dispatch_s

    def run(self, num_dispatches, program=PROGRAM, limit=10**6):
        lengths = []
        for _ in range(num_dispatches):
            wanted = max_steps(self.pacer, program)
            num_steps = min(wanted, limit)
            dispatch_total_s = self.dispatch_s + num_steps * self.multi_step_s
            self.now += dispatch_total_s if num_steps > 1 else self.single_s
            self.pacer.launched(0, wanted)
            self.pacer.ended(program, 0, wanted, num_steps, float(num_steps), self.now)
            lengths.append(num_steps)
        return lengths


def test_several_steps_stay_if_they_are_faster():
    clock = Clock(Pacer(StepTime()), single_s=0.0019, multi_step_s=0.0015)
    trial = clock.run(TRIAL + TRIAL_OF_SEVERAL)
    several = [5] * (1 + STRETCH[SEVERAL])  # predicted by the time of single steps
    assert trial == TRIAL * [1] + several + STRETCH[SEVERAL] * [6]
    clock.run(FIRST_PROBES)
    assert clock.run(50).count(26) >= 50 - PROBE_OF_SINGLE


def test_several_steps_are_given_up_if_they_are_slower():
    clock = Clock(Pacer(StepTime()), single_s=0.002, multi_step_s=0.0025)
    assert clock.run(TRIAL + TRIAL_OF_SEVERAL).count(1) == TRIAL
    clock.run(FIRST_PROBES)
    assert clock.run(200).count(1) >= 200 - PROBE_OF_SEVERAL


@pytest.mark.parametrize("multi_step_s", [0.0015, 0.0025])
def test_the_other_way_is_tried_again_from_time_to_time(multi_step_s):
    clock = Clock(Pacer(StepTime()), 0.002, multi_step_s)
    clock.run(FIRST_PROBES)
    started, lengths = clock.now, clock.run(20_000)
    others = sum(length for length in lengths if (length == 1) == (multi_step_s < 0.002))
    lost = others * abs(multi_step_s - 0.002) / (clock.now - started)
    assert 0.5 * PROBE_FRACTION[PLAIN] < lost < 1.2 * PROBE_FRACTION[PLAIN]


@pytest.mark.parametrize("better", ["single", "multi_step"])
def test_a_choice_made_in_noise_is_mended(better):
    quiet = (
        {"single_s": 0.002, "multi_step_s": 0.001}
        if better == "multi_step"
        else {"single_s": 0.001, "multi_step_s": 0.002}
    )
    noisy = {"single_s": quiet["multi_step_s"], "multi_step_s": quiet["single_s"]}
    clock = Clock(Pacer(StepTime()), **noisy)
    clock.run(200)
    assert (max_steps(clock.pacer) > 1) != (better == "multi_step")
    clock.single_s, clock.multi_step_s = quiet["single_s"], quiet["multi_step_s"]
    end_s = clock.now + 8.0
    while clock.now < end_s:
        clock.run(1)
    assert (median(clock.run(21)) > 1) == (better == "multi_step")


@pytest.mark.parametrize(("single_s", "multi_step_s"), [(0.002, 0.0015), (0.002, 0.0022), (0.004, 0.005)])
def test_a_machine_that_is_slow_half_of_the_time_is_paced_nearly_as_fast_as_can_be(
    single_s: float, multi_step_s: float
) -> None:
    """Choices are a dispatch ahead, as the engine's are: when all gets slower, one more of the same kind follows."""
    pacer, rng, now_s, ideal_s = Pacer(StepTime()), random.Random(1), 0.0, 0.0
    in_flight: list[int] = []
    while now_s < 20:
        in_flight.append(max_steps(pacer))
        pacer.launched(0, in_flight[-1])
        if len(in_flight) == 1:
            continue
        num_steps = in_flight.pop(0)
        slowness = (1 + 0.5 * rng.expovariate(1)) * (2 if now_s % 1 > 0.5 else 1)
        now_s += num_steps * (single_s if num_steps == 1 else multi_step_s) * slowness
        ideal_s += num_steps * min(single_s, multi_step_s) * slowness
        pacer.ended(PROGRAM, 0, num_steps, num_steps, float(num_steps), now_s)
    assert ideal_s / now_s > 0.97


def test_samples_are_of_one_kind_though_prompts_come_between() -> None:
    pacer = Pacer(StepTime())
    clock = Clock(pacer, single_s=0.002, multi_step_s=0.0015)
    clock.run(FIRST_PROBES)
    for _ in range(500):
        clock.run(3)
        pacer.pause()
    times = pacer._step_time.dispatches(PROGRAM)
    assert times.round_s(SINGLE) / times.round_s(SEVERAL) == pytest.approx(0.002 / 0.0015, rel=0.01)


@pytest.mark.parametrize("step_s", [1e-5, 0.001, 0.004])
def test_no_dispatch_takes_longer_than_its_bound(step_s):
    clock, lengths = Clock(Pacer(StepTime()), 1.1 * step_s, step_s), []
    for _ in range(400):
        limit_s = max(DISPATCH_S, min(QUIET_FRACTION * clock.now, QUIET_DISPATCH_S))
        lengths += clock.run(1)
        assert lengths[-1] <= max(1.0, limit_s / step_s)
    assert max(lengths) == min(QUIET_DISPATCH_S / step_s, MAX_STEPS)


def test_dispatches_are_short_after_a_prompt() -> None:
    clock = Clock(Pacer(StepTime()), 0.0021, 0.0019)
    assert max(clock.run(FIRST_PROBES)) == 21
    clock.pacer.pause()
    assert 1 < max(clock.run(5)) <= DISPATCH_S / 0.0019
    clock.run(FIRST_PROBES)
    assert max(clock.run(50)) == 21


def test_steps_longer_than_half_a_dispatch_are_joined_only_in_quiet_times() -> None:
    clock = Clock(Pacer(StepTime()), 0.012, 0.009)
    assert set(clock.run(8)) == {1}
    clock.run(FIRST_PROBES)
    assert median(clock.run(21)) == 4
    clock.pacer.pause()
    assert set(clock.run(8)) == {1}


def test_dispatches_get_shorter_as_steps_get_longer():
    clock = Clock(Pacer(StepTime()), 0.0021, 0.0019)
    assert clock.run(FIRST_PROBES)[-1] == 21
    clock.multi_step_s = 0.0039
    assert max(clock.run(50)[PROBE_OF_SINGLE + 1 + STRETCH[SEVERAL] :]) == 10


def test_an_end_seen_late_makes_no_dispatch_longer():
    pacer, now = Pacer(StepTime()), 0.0
    for index in range(200):
        num_steps = max_steps(pacer)
        now += 0.001 * num_steps
        late_s = 0.005 if num_steps > 1 and index % 5 == 0 else 0.0
        pacer.launched(0, num_steps)
        pacer.ended(PROGRAM, 0, num_steps, num_steps, float(num_steps), now + late_s)
        assert num_steps * 0.001 <= 2 * QUIET_DISPATCH_S


def test_long_steps_are_dispatched_one_by_one():
    assert set(Clock(Pacer(StepTime()), 0.03, 0.01).run(60)) == {1}


def test_no_dispatch_has_more_steps_than_its_program():
    pacer = Pacer(StepTime())
    for program in (StepShape(1, 6), StepShape(64, 3)):
        assert max(Clock(pacer, 0.0011, 0.001).run(100, program)) == program.num_rounds
        assert max_steps(Pacer(StepTime(), dispatch_s=math.inf), program) == program.num_rounds


def test_pauses_do_not_decide():
    clock = Clock(Pacer(StepTime()), 0.002, 0.001)
    for _ in range(60):
        clock.run(1)
        if max_steps(clock.pacer) > 1:
            clock.now += 5.0  # once in the midst of each kind
            clock.run(1)
            break
    clock.run(80)
    assert max_steps(clock.pacer) > 1


def test_dispatches_cut_short_do_not_decide():
    clock = Clock(Pacer(StepTime()), 0.0019, 0.0015, dispatch_s=0.001)
    cut = clock.run(100, limit=2)
    assert 0 < cut[-50:].count(2) < 50, "the other way is tried, too"
    clock.run(FIRST_PROBES)
    lengths = clock.run(50)
    assert lengths.count(25) >= 50 - PROBE_OF_SINGLE
    assert set(lengths) <= {1, 25}


def test_prefills_are_not_timed():
    pacer = Pacer(StepTime())
    for i in range(100):
        if i % 2:
            pacer.ended(PROGRAM, 0, 1, 1, 1.0, float(i))
        else:
            pacer.pause()
        assert max_steps(pacer) == 1


def test_programs_are_measured_by_themselves():
    pacer, other = Pacer(StepTime()), StepShape(8, MAX_STEPS)
    Clock(pacer, 0.002, 0.001).run(60)
    Clock(pacer, 0.002, 0.003).run(60, other)
    assert median(Clock(pacer, 0.002, 0.001).run(21)) > 1 == median(Clock(pacer, 0.002, 0.003).run(21, other))


@pytest.mark.parametrize("steps", [1, 7])
def test_a_number_is_taken_as_it_is(steps):
    clock = Clock(Pacer(StepTime(), dispatch_s=math.inf), 1.0, 5.0)
    assert clock.run(30, StepShape(1, steps)) == 30 * [steps]


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), (1, 1), ("16", 16), (1024, 1024)])
def test_option(given, expected):
    assert EngineConfig(multi_step=given).multi_step == expected


@pytest.mark.parametrize("given", [0, -3, True, 2.0, "some", "-1", "", None, 1025, "9999"])
def test_option_refused(given):
    with pytest.raises(ConfigError, match=r"multi_step must be 'auto' or an integer in \[1, 1024\], got"):
        EngineConfig(multi_step=given)


def test_programs_of_several_steps():
    assert EngineConfig().max_steps == EngineConfig(compile_ahead="all").max_steps == MAX_STEPS
    assert EngineConfig(compile_ahead="minimal").max_steps == 1
    assert EngineConfig(compile_ahead="minimal", multi_step=4).max_steps == 4


def test_idle_time_is_no_step():
    """Answers of nine tokens, a second apart: what lies between them must not count as a slow step."""
    clock = Clock(Pacer(StepTime()), single_s=0.002, multi_step_s=0.0025)
    for _ in range(40):
        clock.run(TRIAL)
        clock.pacer.pause()
        clock.now += 1.0
    assert clock.run(50) == 50 * [1]

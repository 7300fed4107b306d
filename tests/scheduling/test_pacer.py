"""The choice between single steps and several per dispatch, on a simulated clock."""

from statistics import median

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.pacer import DISPATCH_S, DISPATCHES, MAX_STEPS, REST_S, ROUNDS, STRETCH, Pacer
from jaxserve.scheduling.plan import StepShape

PROGRAM = StepShape(1, MAX_STEPS)


class Clock:
    """Runs what a pacer asks for: a dispatch costs `dispatch_s` and each of its steps `step_s`; returns the lengths."""

    def __init__(self, pacer, single_s, multi_step_s, dispatch_s=0.0):
        self.pacer, self.now = pacer, 0.0
        self.single_s, self.multi_step_s, self.dispatch_s = single_s, multi_step_s, dispatch_s

    def run(self, num_dispatches, program=PROGRAM, limit=10**6):
        lengths = []
        for _ in range(num_dispatches):
            wanted = self.pacer.max_steps(program)
            num_steps = min(wanted, limit)
            dispatch_total_s = self.dispatch_s + num_steps * self.multi_step_s
            self.now += dispatch_total_s if num_steps > 1 else self.single_s
            self.pacer.ended(program, wanted, num_steps, self.now)
            lengths.append(num_steps)
        return lengths


def test_several_steps_stay_where_they_are_faster():
    clock = Clock(Pacer("auto"), single_s=0.0019, multi_step_s=0.0015)
    trial = clock.run(ROUNDS * (1 + STRETCH + 1 + DISPATCHES))  # the first of each kind does not follow another
    assert trial == ROUNDS * ((1 + STRETCH) * [1] + (1 + DISPATCHES) * [5])  # predicted by the time of single steps
    assert clock.run(50) == 50 * [6]


def test_several_steps_go_where_they_are_slower():
    clock = Clock(Pacer("auto"), single_s=0.002, multi_step_s=0.0025)
    assert sum(length > 1 for length in clock.run(100)) == (1 + DISPATCHES) * ROUNDS
    assert clock.run(50) == 50 * [1]


@pytest.mark.parametrize("multi_step_s", [0.0015, 0.0025])
def test_the_other_way_is_tried_again_from_time_to_time(multi_step_s):
    clock = Clock(Pacer("auto"), 0.002, multi_step_s)
    clock.run(100)
    started, num_steps = clock.now, clock.run(2000)
    others = sum((n == 1) == (multi_step_s < 0.002) for n in num_steps)
    num_rounds = (clock.now - started) / REST_S
    assert 0.8 * num_rounds <= others / (1 + STRETCH if multi_step_s < 0.002 else 1 + DISPATCHES) <= num_rounds + 1


@pytest.mark.parametrize("better", ["single", "multi_step"])
def test_a_choice_made_in_noise_is_mended(better):
    quiet = (
        {"single_s": 0.002, "multi_step_s": 0.001}
        if better == "multi_step"
        else {"single_s": 0.001, "multi_step_s": 0.002}
    )
    noisy = {"single_s": quiet["multi_step_s"], "multi_step_s": quiet["single_s"]}
    clock = Clock(Pacer("auto"), **noisy)
    clock.run(200)
    assert (clock.pacer.max_steps(PROGRAM) > 1) != (better == "multi_step")
    clock.single_s, clock.multi_step_s = quiet["single_s"], quiet["multi_step_s"]
    end_s = clock.now + (ROUNDS // 2 + 2) * REST_S
    while clock.now < end_s:
        clock.run(1)
    assert (median(clock.run(21)) > 1) == (better == "multi_step")


@pytest.mark.parametrize("step_s", [1e-5, 0.001, 0.004])
def test_no_dispatch_takes_longer_than_its_bound(step_s):
    lengths = Clock(Pacer("auto"), 1.1 * step_s, step_s).run(100)
    assert 1 < max(lengths) <= min(DISPATCH_S / step_s, MAX_STEPS)


def test_dispatches_get_shorter_as_steps_get_longer():
    clock = Clock(Pacer("auto"), 0.0021, 0.0019)
    assert clock.run(70)[-1] == 5
    clock.multi_step_s = 0.0039
    assert clock.run(1 + DISPATCHES)[-1] == 2


def test_an_end_seen_late_makes_no_dispatch_longer():
    pacer, now = Pacer("auto"), 0.0
    for index in range(200):
        num_steps = pacer.max_steps(PROGRAM)
        now += 0.001 * num_steps
        late_s = 0.005 if num_steps > 1 and index % 5 == 0 else 0.0
        pacer.ended(PROGRAM, num_steps, num_steps, now + late_s)
        assert num_steps * 0.001 <= 2 * DISPATCH_S


def test_long_steps_go_one_by_one():
    assert set(Clock(Pacer("auto"), 0.03, 0.01).run(60)) == {1}


def test_no_dispatch_has_more_steps_than_its_program():
    pacer = Pacer("auto")
    for program in (StepShape(1, 6), StepShape(64, 3)):
        assert max(Clock(pacer, 0.0011, 0.001).run(100, program)) == program.num_rounds
        assert Pacer(5).max_steps(program) == min(5, program.num_rounds)


def test_pauses_do_not_decide():
    clock = Clock(Pacer("auto"), 0.002, 0.001)
    for _ in range(60):
        clock.run(1)
        if clock.pacer.max_steps(PROGRAM) > 1:
            clock.now += 5.0  # once in the midst of each kind
            clock.run(1)
            break
    clock.run(80)
    assert clock.pacer.max_steps(PROGRAM) > 1


def test_dispatches_cut_short_do_not_decide():
    clock = Clock(Pacer("auto"), 0.0019, 0.0015, dispatch_s=0.001)
    cut = clock.run(100, limit=2)
    assert cut[-STRETCH - 3 :].count(2) == 2, "the trial goes on"
    clock.run(100)
    assert clock.run(50) == 50 * [5]


def test_prefills_are_not_timed():
    pacer = Pacer("auto")
    for i in range(100):
        if i % 2:
            pacer.ended(PROGRAM, 1, 1, float(i))
        else:
            pacer.pause()
        assert pacer.max_steps(PROGRAM) == 1


def test_programs_are_measured_by_themselves():
    pacer, other = Pacer("auto"), StepShape(8, MAX_STEPS)
    Clock(pacer, 0.002, 0.001).run(60)
    Clock(pacer, 0.002, 0.003).run(60, other)
    assert pacer.max_steps(PROGRAM) > 1 == pacer.max_steps(other)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_number_is_taken_as_it_is(steps):
    clock = Clock(Pacer(steps), 1.0, 5.0)
    assert clock.run(30) == 30 * [steps]


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
    clock = Clock(Pacer("auto"), single_s=0.002, multi_step_s=0.0025)
    for _ in range(40):
        clock.run(1 + STRETCH)
        clock.pacer.pause()
        clock.now += 1.0
    assert clock.run(50) == 50 * [1]

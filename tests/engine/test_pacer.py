"""The choice between single steps and bursts, on a simulated clock."""

from statistics import median

import pytest

from jaxserve.config import MAX_BURST_STEPS, EngineConfig
from jaxserve.engine.pacer import BURST_S, BURSTS, REST_S, ROUNDS, STRETCH, Pacer
from jaxserve.errors import ConfigError


class Clock:
    """Runs what a pacer asks for: a dispatch costs `dispatch_s` and each of its steps `step_s`; returns the lengths."""

    def __init__(self, pacer, single_s, burst_step_s, burst_dispatch_s=0.0):
        self.pacer, self.now = pacer, 0.0
        self.single_s, self.burst_step_s, self.burst_dispatch_s = single_s, burst_step_s, burst_dispatch_s

    def run(self, num_dispatches, bucket=1, limit=10**6):
        lengths = []
        for _ in range(num_dispatches):
            num_steps = min(self.pacer.max_steps(bucket), limit)
            burst_s = self.burst_dispatch_s + num_steps * self.burst_step_s
            self.now += burst_s if num_steps > 1 else self.single_s
            self.pacer.ended(bucket, num_steps, self.now)
            lengths.append(num_steps)
        return lengths


def test_faster_bursts_stay():
    clock = Clock(Pacer("auto"), single_s=0.0019, burst_step_s=0.0015)
    trial = clock.run(ROUNDS * (1 + STRETCH + 1 + BURSTS))  # the first of each kind does not follow another
    assert trial == ROUNDS * ((1 + STRETCH) * [1] + (1 + BURSTS) * [5])  # by the time of single steps
    assert clock.run(50) == 50 * [6]  # by that of a burst's


def test_slower_bursts_go():
    clock = Clock(Pacer("auto"), single_s=0.002, burst_step_s=0.0025)
    assert sum(length > 1 for length in clock.run(100)) == (1 + BURSTS) * ROUNDS
    assert clock.run(50) == 50 * [1]


@pytest.mark.parametrize("burst_step_s", [0.0015, 0.0025])
def test_the_other_way_is_tried_again_from_time_to_time(burst_step_s):
    clock = Clock(Pacer("auto"), 0.002, burst_step_s)
    clock.run(100)
    started, num_steps = clock.now, clock.run(2000)
    others = sum((n == 1) == (burst_step_s < 0.002) for n in num_steps)
    num_rounds = (clock.now - started) / REST_S
    assert 0.8 * num_rounds <= others / (1 + STRETCH if burst_step_s < 0.002 else 1 + BURSTS) <= num_rounds + 1


@pytest.mark.parametrize("better", ["single", "burst"])
def test_a_choice_made_in_noise_is_mended(better):
    quiet = (
        {"single_s": 0.002, "burst_step_s": 0.001} if better == "burst" else {"single_s": 0.001, "burst_step_s": 0.002}
    )
    noisy = {"single_s": quiet["burst_step_s"], "burst_step_s": quiet["single_s"]}
    clock = Clock(Pacer("auto"), **noisy)
    clock.run(200)
    assert (clock.pacer.max_steps(1) > 1) != (better == "burst")
    clock.single_s, clock.burst_step_s = quiet["single_s"], quiet["burst_step_s"]
    end_s = clock.now + (ROUNDS // 2 + 2) * REST_S
    while clock.now < end_s:
        clock.run(1)
    assert (median(clock.run(21)) > 1) == (better == "burst")


@pytest.mark.parametrize("step_s", [1e-5, 0.001, 0.004])
def test_no_burst_takes_longer_than_its_bound(step_s):
    lengths = Clock(Pacer("auto"), 1.1 * step_s, step_s).run(100)
    assert 1 < max(lengths) <= min(BURST_S / step_s, MAX_BURST_STEPS)


def test_bursts_get_shorter_as_steps_get_longer():
    clock = Clock(Pacer("auto"), 0.0021, 0.0019)
    assert clock.run(70)[-1] == 5
    clock.burst_step_s = 0.0039
    assert clock.run(1 + BURSTS)[-1] == 2


def test_an_end_seen_late_makes_no_burst_longer():
    pacer, now = Pacer("auto"), 0.0
    for index in range(200):
        num_steps = pacer.max_steps(1)
        now += 0.001 * num_steps
        late_s = 0.005 if num_steps > 1 and index % 5 == 0 else 0.0
        pacer.ended(1, num_steps, now + late_s)
        assert num_steps * 0.001 <= 2 * BURST_S


def test_long_steps_make_no_bursts():
    assert set(Clock(Pacer("auto"), 0.03, 0.01).run(60)) == {1}


def test_pauses_do_not_decide():
    clock = Clock(Pacer("auto"), 0.002, 0.001)
    for _ in range(60):
        clock.run(1)
        if clock.pacer.max_steps(1) > 1:
            clock.now += 5.0  # once in the midst of each kind
            clock.run(1)
            break
    clock.run(80)
    assert clock.pacer.max_steps(1) > 1


def test_bursts_cut_short_do_not_decide():
    clock = Clock(Pacer("auto"), 0.0019, 0.0015, burst_dispatch_s=0.001)
    cut = clock.run(100, limit=2)
    assert cut[-STRETCH - 3 :].count(2) == 2, "the trial goes on"
    clock.run(100)
    assert clock.run(50) == 50 * [5]


def test_prefills_are_not_timed():
    pacer = Pacer("auto")
    for i in range(100):
        pacer.ended(1 if i % 2 else None, 1, float(i))
        assert pacer.max_steps(1) == 1


def test_buckets_are_chosen_by_themselves():
    pacer = Pacer("auto")
    Clock(pacer, 0.002, 0.001).run(60, bucket=1)
    Clock(pacer, 0.002, 0.003).run(60, bucket=8)
    assert pacer.max_steps(1) > 1 == pacer.max_steps(8)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_number_is_taken_as_it_is(steps):
    clock = Clock(Pacer(steps), 1.0, 5.0)
    assert clock.run(30) == 30 * [steps]


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), (1, 1), ("16", 16), (1024, 1024)])
def test_option(given, expected):
    assert EngineConfig(burst=given).burst == expected


@pytest.mark.parametrize("given", [0, -3, True, 2.0, "some", "-1", "", None, 1025, "9999"])
def test_option_refused(given):
    with pytest.raises(ConfigError, match=r"burst must be 'auto' or an integer in \[1, 1024\], got"):
        EngineConfig(burst=given)


def test_programs_of_bursts():
    assert EngineConfig().max_burst_steps == EngineConfig(compile_ahead="all").max_burst_steps == MAX_BURST_STEPS
    assert EngineConfig(compile_ahead="minimal").max_burst_steps == 1
    assert EngineConfig(compile_ahead="minimal", burst=4).max_burst_steps == 4


def test_idle_time_is_no_step():
    """Answers of nine tokens, a second apart: what lies between them must not count as a slow step."""
    clock = Clock(Pacer("auto"), single_s=0.002, burst_step_s=0.0025)
    for _ in range(40):
        clock.run(1 + STRETCH)
        clock.pacer.pause()
        clock.now += 1.0
    assert clock.run(50) == 50 * [1]

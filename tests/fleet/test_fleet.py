import json
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_tokenizers
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import records_by_id

from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestFailure, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import ConfigError, EngineDiedError, RequestError
from jaxserve.fleet import fleet
from jaxserve.fleet.fleet import MAX_FAILED_STARTS, MAX_ISOLATED_DEATHS, Died, Fleet, NewRequest, Server, Started
from jaxserve.openai.batch_files import run_batch
from jaxserve.scheduling.router import Router
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.random_runs import examples

MAX_NUM_SEQS = 4
POISON = [66, 66, 66]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(autouse=True)
def a_call_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "CALL_S", 0.0)


class LocalActors:
    """Actors in this process that answer in random order, and die as `dies` says or while they serve POISON."""

    def __init__(self, count: int, tokenizer: Tokenizer, rng: random.Random, dies: Callable[[], bool]) -> None:
        self.count = count
        self.num_starts = [0] * count
        self.num_deaths = 0
        self.calls: list[deque] = [deque() for _ in range(count)]
        self.engines: list[FakeEngine | None] = [None] * count
        self._servers: list[Server | None] = [None] * count
        self._tokenizer, self._rng, self._dies = tokenizer, rng, dies

    def start(self, index: int) -> None:
        assert not self.calls[index], "of a dead actor"
        self.num_starts[index] += 1
        self.calls[index].append(None)

    def serve(self, index: int, aborted: Sequence[str], added: Sequence[NewRequest]) -> None:
        self.calls[index].append((list(aborted), list(added)))

    def wait(self) -> tuple[int, object]:
        index = self._rng.choice([i for i, calls in enumerate(self.calls) if calls])
        call = self.calls[index].popleft()
        if self._dies():
            return self._die(index)
        if call is None:
            self.engines[index] = FakeEngine(self._tokenizer, max_num_seqs=MAX_NUM_SEQS)
            self._servers[index] = Server(self.engines[index])
            return index, self._servers[index].started()
        served = self._servers[index].serve(*call)
        assert self.num_sequences(index) <= max(2 * MAX_NUM_SEQS, self.widest(index))
        if any(request.output.prompt_token_ids == POISON for request in self.engines[index].waiting.values()):
            return self._die(index)
        return index, served

    def _die(self, index: int) -> tuple[int, Died]:
        self.engines[index] = None
        self.calls[index].clear()
        self.num_deaths += 1
        return index, Died("out of luck")

    def num_sequences(self, index: int) -> int:
        engine = self.engines[index]
        return 0 if engine is None else sum(request.params.n for request in engine.waiting.values())

    def widest(self, index: int) -> int:
        engine = self.engines[index]
        return 0 if engine is None else max((request.params.n for request in engine.waiting.values()), default=0)


def never() -> bool:
    return False


def new_fleet(actors: LocalActors, model: Path) -> Fleet:
    return Fleet(EngineConfig(model=str(model)), actors)


def wait_until_ready(served: Fleet) -> None:
    for _ in range(100_000):
        if all(seat.ready for seat in served._seats):
            return
        served.wait()
    raise AssertionError("some actors never start")


def drain(served: Fleet) -> dict[str, RequestOutput | RequestFailure]:
    ended: dict[str, RequestOutput | RequestFailure] = {}
    while served.has_unfinished():
        for output in served.wait():
            assert output.request_id not in ended
            ended[output.request_id] = output
    return ended


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def alone(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine = FakeEngine(tokenizer)
    engine.add_request("x", prompt, params)
    while engine.has_unfinished():
        (output,) = engine.step()
    return tokens(output)


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 4),
    num_requests=st.integers(0, 60),
    num_poisons=st.sampled_from([0, 0, 1, 3]),
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_every_request_ends_once_whichever_actor_dies(
    model: Path, tokenizer: Tokenizer, seed: int, count: int, num_requests: int, num_poisons: int, deaths: float
) -> None:
    rng = random.Random(seed)
    # Now and then actors live whatever the odds, so that starts succeed; and at the end, so that no request fails
    # alone.
    luck = iter([i % 3 > 0 and rng.random() < deaths for i in range(200)])
    actors = LocalActors(count, tokenizer, rng, lambda: next(luck, False))
    try:
        served = new_fleet(actors, model)
    except ConfigError:  # all died at once
        return
    requests = {
        str(i): ([rng.randrange(60)], SamplingParams(n=rng.choice([1, 1, 2, 9]), max_tokens=rng.randint(1, 9), seed=i))
        for i in range(num_requests)
    }
    poisons = {f"poison {i}" for i in range(num_poisons)}
    order = [*requests, *poisons]
    rng.shuffle(order)
    for request_id in order:
        prompt, params = requests.get(request_id, (POISON, SamplingParams(max_tokens=5)))
        served.add_request(request_id, prompt, params)
    ended = drain(served)
    assert ended.keys() == set(order)
    failed = {request_id for request_id, output in ended.items() if isinstance(output, RequestFailure)}
    assert failed >= poisons
    if not deaths:
        assert failed == poisons
    for request_id in failed:
        assert isinstance(ended[request_id].error, EngineDiedError)
    for request_id in requests.keys() - failed:
        assert tokens(ended[request_id]) == alone(tokenizer, *requests[request_id])


@pytest.mark.parametrize("count", [1, 3])
def test_only_the_request_that_kills_actors_fails(model: Path, tokenizer: Tokenizer, count: int) -> None:
    actors = LocalActors(count, tokenizer, random.Random(0), never)
    served = new_fleet(actors, model)
    for i in range(50):
        served.add_request(str(i), POISON if i == 20 else [i], SamplingParams(max_tokens=3))
    ended = drain(served)
    (failure,) = [output for output in ended.values() if isinstance(output, RequestFailure)]
    assert failure.request_id == "20"
    assert isinstance(failure.error, EngineDiedError)
    assert str(failure.error) == (
        f"{MAX_ISOLATED_DEATHS} engines died while they served only this request; the last: out of luck"
    )
    halvings = (2 * MAX_NUM_SEQS).bit_length() - 1
    assert actors.num_deaths <= halvings + MAX_ISOLATED_DEATHS


def test_no_rows_are_free_while_a_request_waits(model: Path, tokenizer: Tokenizer) -> None:
    """Once all actors run, none has fewer requests than rows while requests wait."""
    actors = LocalActors(3, tokenizer, random.Random(1), never)
    served = new_fleet(actors, model)
    for i in range(40):
        served.add_request(str(i), [i], SamplingParams(max_tokens=10 + i % 7))
    while not all(isinstance(engine, FakeEngine) for engine in actors.engines):
        served.wait()
    while served.has_unfinished():
        served.wait()
        loads = [seat.num_sequences for seat in served._seats]
        if served._queue:
            assert min(loads) >= MAX_NUM_SEQS
    assert all(engine.num_added >= MAX_NUM_SEQS for engine in actors.engines)


def test_an_idle_actor_takes_over_what_waits_in_a_busy_one(model: Path, tokenizer: Tokenizer) -> None:
    actors = LocalActors(2, tokenizer, random.Random(0), never)
    late = actors.calls[1]
    actors.calls[1] = deque()  # the second starts when the first has been given all requests
    actors.start = lambda index: LocalActors.start(actors, index) if index == 0 else late.append(None)
    served = new_fleet(actors, model)
    for i in range(2 * MAX_NUM_SEQS):
        served.add_request(str(i), [i], SamplingParams(max_tokens=30))
    served.wait()
    assert [seat.num_sequences for seat in served._seats] == [2 * MAX_NUM_SEQS, 0]
    actors.calls[1] = late
    ended = drain(served)
    assert len(ended) == 2 * MAX_NUM_SEQS
    assert actors.engines[1].num_added == MAX_NUM_SEQS
    assert all(tokens(output)[0] for output in ended.values())


def test_requests_go_where_their_prefix_is(model: Path, tokenizer: Tokenizer) -> None:
    """The questions of a document are served by one actor, while all actors stay full."""
    actors = LocalActors(4, tokenizer, random.Random(0), never)
    served = new_fleet(actors, model)
    wait_until_ready(served)
    prompts = [f"document {i // 4} " + 300 * "long " + f"question {i}" for i in range(96)]
    for i in range(96):
        served.add_request(str(i), prompts[i], SamplingParams(max_tokens=2 + i % 7))
    seats: dict[int, set[int]] = {}
    while served.has_unfinished():
        served.wait()
        for seat in served._seats:
            for job in seat.jobs.values():
                seats.setdefault(int(job.request_id) // 4, set()).add(seat.index)
    assert sum(map(len, seats.values())) <= 1.6 * len(seats)
    assert {index for held in seats.values() for index in held} == set(range(4))


def test_a_request_that_waits_for_a_full_actor_adds_to_its_load(model: Path, tokenizer: Tokenizer) -> None:
    """Otherwise all questions of a document would wait for the actor that has it, however many they are."""
    actors = LocalActors(2, tokenizer, random.Random(0), never)
    served = new_fleet(actors, model)
    wait_until_ready(served)
    document = 300 * "long "
    served.add_request("first", document, SamplingParams(max_tokens=300, n=2 * MAX_NUM_SEQS))
    served.wait()
    (full,) = [seat for seat in served._seats if seat.jobs]
    (other,) = [seat for seat in served._seats if not seat.jobs]
    served.add_request("other", "o", SamplingParams(max_tokens=300, n=2))
    served.wait()
    assert (full.num_sequences, other.num_sequences) == (2 * MAX_NUM_SEQS, 2)
    for i in range(30):
        served.add_request(str(i), f"{document} question {i}", SamplingParams(max_tokens=300))
    served.wait()
    assert [seat.num_sequences for seat in (full, other)] == [2 * MAX_NUM_SEQS] * 2
    assert served._router._loads == [seat.load for seat in served._seats], "once for all steps that they wait"


@pytest.mark.parametrize("count", [4, 64])
def test_an_answer_costs_the_same_whatever_the_number_of_actors(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The cost is counted in calls of the router: loads are set for the few actors that changed."""
    actors = InstantActors(count)
    served = new_fleet(actors, model)
    wait_until_ready(served)
    set_load, looks = Router.set_load, []
    monkeypatch.setattr(Router, "set_load", lambda *args, **options: looks.append(1) or set_load(*args, **options))
    for i in range(2 * count * MAX_NUM_SEQS):
        served.add_request(str(i), [i], SamplingParams())
    served.wait()
    looks.clear()
    for i in range(100):
        served.add_request(f"new {i}", [i], SamplingParams())
        assert len(served.wait()) <= 1
    assert len(looks) <= 300


class InstantActors:
    """Actors that end one request in a call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._answers: deque = deque()
        self._requests: list[deque[NewRequest]] = [deque() for _ in range(count)]

    def start(self, index: int) -> None:
        sizes = ScheduleConfig(MAX_NUM_SEQS, 512, max_model_len=1000, page_size=16, num_pages=100)
        self._answers.append((index, Started(sizes, SamplingParams())))

    def serve(self, index: int, aborted: Sequence[str], added: Sequence[NewRequest]) -> None:
        requests = self._requests[index]
        requests.extend(added)
        ended = [RequestFailure(requests.popleft().request_id, RequestError("served"))] if requests else []
        self._answers.append((index, ended))

    def wait(self) -> tuple[int, object]:
        return self._answers.popleft()


def test_aborted_requests_are_forgotten_wherever_they_are(model: Path, tokenizer: Tokenizer) -> None:
    actors = LocalActors(1, tokenizer, random.Random(0), never)
    served = new_fleet(actors, model)
    for i in range(20):
        served.add_request(str(i), [i], SamplingParams(max_tokens=20))
    for _ in range(3):
        served.wait()
    for i in range(0, 20, 2):
        served.abort(str(i))
    served.abort("none")
    served.add_request("0", [0], SamplingParams(max_tokens=2))  # an id may come again
    ended = drain(served)
    assert sorted(ended, key=int) == ["0", *map(str, range(1, 20, 2))]
    assert len(tokens(ended["0"])[0]) == 2
    assert not actors.engines[0].has_unfinished()


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3), deaths=st.sampled_from([0.0, 0.05]))
def test_an_id_that_comes_again_gets_its_own_output(
    model: Path, tokenizer: Tokenizer, seed: int, count: int, deaths: float
) -> None:
    """Late answers of actors to aborted requests of the same id are ignored."""
    rng = random.Random(seed)
    actors = LocalActors(count, tokenizer, rng, lambda: rng.random() < deaths and actors.num_deaths < 2)
    served = new_fleet(actors, model)
    current: dict[str, tuple[list[int], SamplingParams]] = {}
    for _ in range(100):
        request_id = rng.choice("abcd")
        if request_id in current:
            served.abort(request_id)
        current[request_id] = [rng.randrange(60)], SamplingParams(max_tokens=rng.randint(1, 4), seed=rng.randrange(99))
        served.add_request(request_id, *current[request_id])
        for output in served.wait() if rng.random() < 0.7 else ():
            assert tokens(output) == alone(tokenizer, *current.pop(output.request_id))
    ended = drain(served)
    assert ended.keys() == current.keys()
    for request_id, output in ended.items():
        assert tokens(output) == alone(tokenizer, *current[request_id])


def test_a_refusal_comes_back_from_wait(model: Path, tokenizer: Tokenizer) -> None:
    served = new_fleet(LocalActors(1, tokenizer, random.Random(0), never), model)
    served.add_request("a", "please refuse", SamplingParams(max_tokens=2))
    served.add_request("b", "please serve", SamplingParams(max_tokens=2))
    ended = drain(served)
    assert "must not say refuse" in str(ended["a"].error)
    assert len(tokens(ended["b"])[0]) == 2


def test_actors_that_never_start_end_the_run(model: Path, tokenizer: Tokenizer) -> None:
    actors = LocalActors(2, tokenizer, random.Random(0), lambda: True)
    with pytest.raises(
        ConfigError, match=re.escape("no engine of the fleet starts, in 3 attempts each; the last: out")
    ):
        new_fleet(actors, model)
    assert actors.num_starts == [MAX_FAILED_STARTS] * 2


def test_the_others_serve_what_an_actor_that_no_longer_starts_had(model: Path, tokenizer: Tokenizer) -> None:
    actors = LocalActors(2, tokenizer, random.Random(0), never)
    served = new_fleet(actors, model)
    wait_until_ready(served)
    for i in range(30):
        served.add_request(str(i), [i], SamplingParams(max_tokens=5))
    served.wait()
    wait = actors.wait
    actors.wait = lambda: actors._die(0) if actors.calls[0] else wait()
    ended = drain(served)
    assert len(ended) == 30
    assert actors.num_starts == [1 + MAX_FAILED_STARTS, 1]
    assert all(isinstance(output, RequestOutput) for output in ended.values())


def test_sizes_are_those_of_all_engines(model: Path, tokenizer: Tokenizer) -> None:
    served = new_fleet(LocalActors(3, tokenizer, random.Random(0), never), model)
    assert served.schedule.max_num_seqs == 3 * MAX_NUM_SEQS
    assert isinstance(Server(FakeEngine(tokenizer)).started(), Started)


def write_batch(path: Path, count: int) -> Path:
    """Return lines of one and three prompts, with one and two samples, and some that are refused here or there."""
    with path.open("w") as file:
        for i in range(count):
            prompts = [f"a {i}", ["a", "b", f"{i}"], ["fine", "refuse"]][(i % 5 == 0) + (i % 10 == 0)]
            body = {"prompt": prompts, "max_tokens": 1 + i % 12, "n": 1 + i % 2} | ({"bad": 1} if i % 17 == 1 else {})
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize("deaths", [0.0, 0.05])
def test_a_batch_over_a_fleet_is_that_of_one_engine(
    model: Path, tokenizer: Tokenizer, tmp_path: Path, deaths: float
) -> None:
    source = write_batch(tmp_path / "in.jsonl", 120)
    run_batch(FakeEngine(tokenizer, EngineConfig(str(model))), source, tmp_path / "one.jsonl", use_tqdm=False)
    rng = random.Random(3)
    actors = LocalActors(3, tokenizer, rng, lambda: rng.random() < deaths and actors.num_deaths < 20)
    summary = run_batch(new_fleet(actors, model), source, tmp_path / "fleet.jsonl", use_tqdm=False)
    assert records_by_id(tmp_path / "fleet.jsonl") == records_by_id(tmp_path / "one.jsonl")
    assert summary.num_errors > 0
    assert bool(deaths) == bool(actors.num_deaths)

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench import workloads
from jaxserve.tools.bench.pictures import check_pictures, with_pictures
from jaxserve.tools.bench.workloads import (
    BUILT_IN,
    Workload,
    WorkloadRequest,
    load_workload,
    poisson_arrivals,
    token_ids,
)

MIXED = Path(__file__).parents[2] / "scripts" / "workloads" / "mixed-64.json"
NEW = {
    "session_id": None,
    "pause_s": 0.0,
    "picture": None,
}  # defaults of newer fields
DIGESTS = {  # digests of the requests as JSON: a change would make figures incomparable with earlier ones
    "agentic": "c558ed02535e67cf",
    "images": "b2ec80cead0fa380",
    "chat-16x4": "e7059bd28ecbd07b",
    "long-prompts-32": "2d696a58f72dc344",
    "long-tail-128": "bf680c802b8aee67",
    "mixed-64": "8619cc46c282dc16",
    "poisson-128": "0a71116c971b6b42",
    "shared-prefix-64": "9bda0afe792068c5",
    "single": "31d47bc3f22ed813",
}
REQUEST = {"prompt_len": 4, "output_len": 2}


def test_built_in_workloads_never_change() -> None:
    assert DIGESTS.keys() == set(BUILT_IN)
    for name, digest in DIGESTS.items():
        fields = [asdict(r).items() for r in load_workload(name).requests]
        requests = json.dumps(
            [{key: value for key, value in each if (key, value) not in NEW.items()} for each in fields]
        )
        assert hashlib.sha256(requests.encode()).hexdigest()[:16] == digest, name


def test_the_file_is_the_built_in_one(tmp_path: Path) -> None:
    assert load_workload(str(MIXED)) == load_workload("mixed-64")
    for name in BUILT_IN:
        path = tmp_path / "copy.json"
        path.write_text(json.dumps(asdict(load_workload(name))))
        assert load_workload(str(path)) == load_workload(name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_have_their_lengths_and_share_their_prefixes(name: str) -> None:
    workload = load_workload(name)
    prompts = token_ids(workload, vocab_size=50)
    assert [len(p) for p in prompts] == [r.prompt_len for r in workload.requests]
    assert {i for p in prompts for i in p} <= set(range(workloads.LOWEST_ID, 50))
    longest: dict[int | None, list[int]] = {}
    for request, prompt in sorted(zip(workload.requests, prompts, strict=True), key=lambda pair: -pair[0].prefix_len):
        prefix = prompt[: request.prefix_len]
        assert longest.setdefault(request.prefix_id, prefix)[: len(prefix)] == prefix
    longest.clear()
    for request, prompt in sorted(zip(workload.requests, prompts, strict=True), key=lambda pair: -pair[0].prompt_len):
        if request.session_id is not None:
            assert longest.setdefault(request.session_id, prompt)[: len(prompt)] == prompt
    tails = {tuple(p[r.prefix_len :]) for r, p in zip(workload.requests, prompts, strict=True)}
    assert len(tails) == len(prompts)


def test_each_picture_has_one_placeholder() -> None:
    workload = load_workload("images")
    prompts, token_id = token_ids(workload, vocab_size=20), 15
    one, other = (with_pictures(workload, prompts, token_id, draw) for draw in (0, 1))
    for request, prompt, again in zip(workload.requests, one, other, strict=True):
        assert prompt["prompt_token_ids"].count(token_id) == 1
        assert len(prompt["prompt_token_ids"]) == request.prompt_len + 1
        pixels = [each["multi_modal_data"]["image"] for each in (prompt, again)]
        assert pixels[0].shape == (*request.picture, 3)
        assert (pixels[0] != pixels[1]).any(), "no run finds pictures of another one"
    assert len({tuple(request.picture) for request in workload.requests}) == 4
    plain = load_workload("single")
    assert token_id not in with_pictures(plain, token_ids(plain, 20), token_id)[0]
    check_pictures(plain, None, "x")
    with pytest.raises(ConfigError, match="images needs a model that takes images, got x"):
        check_pictures(workload, None, "x")


def test_token_ids_are_those_of_the_streams() -> None:
    workload = Workload("w", 7, (WorkloadRequest(5, 1), WorkloadRequest(6, 1, prefix_id=3, prefix_len=4)))
    own = [np.random.default_rng([7, 0, i]) for i in range(2)]
    shared = np.random.default_rng([7, 1, 3])
    assert token_ids(workload, 99) == [
        own[0].integers(10, 99, 5).tolist(),
        shared.integers(10, 99, 4).tolist() + own[1].integers(10, 99, 2).tolist(),
    ]
    with pytest.raises(ConfigError, match="more than 10 tokens, got 10"):
        token_ids(workload, 10)


def test_poisson_arrivals_scale_with_the_rate_and_have_its_mean() -> None:
    workload = Workload("w", 3, (WorkloadRequest(1, 1),) * 4000)
    slow, fast = poisson_arrivals(workload, 2.0), poisson_arrivals(workload, 8.0)
    np.testing.assert_allclose(np.array(slow), np.array(fast) * 4)
    gaps = np.diff(slow, prepend=0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.05)  # standard deviation of an exponential, equal to its mean


def test_arrival_seeds_are_independent() -> None:
    workload = Workload("w", 3, (WorkloadRequest(1, 1),) * 4000)
    first, second = (np.diff(poisson_arrivals(workload, 1.0, seed)) for seed in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert poisson_arrivals(workload, float("inf")) == [0.0] * 4000


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("share", [0.4, 1, 2.5])
def test_a_resized_workload_repeats_with_prompts_of_its_own(name: str, share: float) -> None:
    workload = load_workload(name)
    size = len(workload.requests)
    resized = workload.resized(max(1, int(share * size)))
    assert len(resized.requests) == max(1, int(share * size))
    assert resized.requests[:size] == workload.requests[: len(resized.requests)]
    prompts = token_ids(resized, vocab_size=5000)
    assert prompts[:size] == token_ids(workload, vocab_size=5000)[: len(prompts)]
    for index, request in enumerate(resized.requests[size:], size):
        before = resized.requests[index - size]
        assert (request.prompt_len, request.output_len) == (before.prompt_len, before.output_len)
        assert request.arrival_s >= before.arrival_s
    pages = [{tuple(p[:16]) for p in prompts[i : i + size] if len(p) >= 16} for i in range(0, len(prompts), size)]
    assert sum(map(len, pages)) == len(set().union(*pages))  # no repetition shares a page with another


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON, but: Expecting property name"),
        ("[]", "a workload must be an object, got"),
        ('{"name": "x", "seed": 1}', r"missing are \['requests'\]"),
        ('{"name": "x", "seed": 1, "requests": [], "extra": 1}', r"got also \['extra'\]"),
        ('{"name": "x", "seed": 1, "requests": []}', "at least one request"),
        ('{"name": "", "seed": 1, "requests": [1]}', "name must be a non-empty string"),
        ('{"name": "x", "seed": -1, "requests": [1]}', "seed must be an integer of 0 or more, got -1"),
        ('{"name": "x", "seed": 1, "requests": [1]}', "request 0: a request must be an object, got 1"),
    ],
)
def test_errors_name_the_wrong_field_of_a_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_workload(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_len": 0}, "prompt_len must be a positive integer, got 0"),
        ({"output_len": 1.5}, "output_len must be a positive integer, got 1.5"),
        ({"arrival_s": -1}, "arrival_s must be a number of 0 or more, got -1"),
        ({"arrival_s": float("nan")}, "arrival_s must be a number of 0 or more, got nan"),
        ({"prefix_id": "a"}, "prefix_id must be an integer of 0 or more"),
        ({"prefix_len": 5}, "prefix_len must be at most prompt_len, got 5 and 4"),
        ({"pause_s": 1.0}, "pause_s needs session_id, the turn's conversation, got only 1.0"),
        ({"tokens": 5}, r"got also \['tokens'\]"),
    ],
)
def test_errors_name_the_wrong_field_of_a_request(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"request 1: .*{message}"):
        workloads.parse_workload({"name": "x", "seed": 1, "requests": [REQUEST, REQUEST | fields]})


def test_an_unknown_workload_lists_the_built_in_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mixed-64'.* or a JSON file, got 'mixed-65'"):
        load_workload("mixed-65")


def test_a_directory_is_no_workload(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the workload .*: Is a directory"):
        load_workload(str(tmp_path))

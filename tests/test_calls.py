"""Arguments of calls that stand for many: lists, and whatever else holds prompts in an order."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import BusyError, RequestError
from jaxserve.offline.offline_calls import Calls, as_list, per_prompt, priorities
from tests.oracles import torch

TEXTS = ["one", "two", "three"]


class Column:
    """Column of a table, as pandas, pyarrow and polars have it: its own methods make a list."""

    def __init__(self, method: str, values: list[Any]) -> None:
        setattr(self, method, lambda: values)

    def __getitem__(self, index: int) -> None:
        raise KeyError(index)  # pandas looks for a label


@pytest.mark.parametrize(
    "given",
    [
        lambda: TEXTS,
        lambda: tuple(TEXTS),
        lambda: (text for text in TEXTS),
        lambda: map(str, TEXTS),
        lambda: np.array(TEXTS),
        lambda: np.array(TEXTS, object),
        lambda: Column("tolist", TEXTS),
        lambda: Column("to_pylist", TEXTS),
        lambda: Column("to_list", TEXTS),
    ],
)
def test_ordered_iterables_are_lists_of_prompts(given: Callable[[], Any]) -> None:
    assert as_list(given()) == TEXTS


def test_columns_of_tables_are_lists_of_prompts() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["zero", *TEXTS]})
    assert as_list(table["text"][1:]) == TEXTS  # its first label is not 0
    assert as_list(table["text"].astype("string")[1:]) == TEXTS
    assert as_list(pandas.Series([[1, 2], [3]])) == [[1, 2], [3]]
    with pytest.raises(RequestError, match="a column of a table"):
        as_list(table)


@pytest.mark.filterwarnings("ignore")  # packages that datasets imports have some
def test_columns_of_datasets_are_lists_of_prompts() -> None:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    table = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table({"prompt": TEXTS})), fingerprint="texts")
    assert as_list(table["prompt"]) == TEXTS
    assert as_list(table) == [{"prompt": text} for text in TEXTS]
    assert as_list(table.data.column("prompt")) == TEXTS  # pyarrow's


@pytest.mark.parametrize("ids", [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), range(3, 5), iter([3, 4])])
def test_integers_are_one_prompt(ids: Any) -> None:
    assert as_list(ids) == [[3, 4]]


@pytest.mark.parametrize("rows", [np.array([[3, 4], [5, 6]]), torch.tensor([[3, 4], [5, 6]])])
def test_rows_of_integers_are_prompts(rows: Any) -> None:
    assert as_list(rows) == [[3, 4], [5, 6]]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("given", [5, None, b"a", {"a", "b"}, np.array(3), SimpleNamespace(columns=["a"])])
def test_unordered_collections_are_rejected(given: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be text, token ids, a dict, or such prompts in order"):
        as_list(given)


def test_parameters_are_of_all_or_of_each() -> None:
    params = SamplingParams()
    for given in (params, [params, params], iter([params, params])):
        assert per_prompt(given, SamplingParams, "sampling_params", 2) == [params, params]
    with pytest.raises(RequestError, match="one for all or one per prompt, got 2 for 3"):
        per_prompt([params, params], SamplingParams, "sampling_params", 3)


@pytest.mark.usefixtures("no_type_checks")
def test_a_priority_is_of_all_or_of_each() -> None:
    assert priorities(None, 2) == [0, 0]
    assert priorities(-3, 2) == priorities(np.int64(-3), 2) == [-3, -3]
    assert priorities((4, 5), 2) == priorities(np.array([4, 5]), 2) == [4, 5]
    for given in ([4], "ab", True, 1.5):
        with pytest.raises(RequestError, match="priority must be one integer for all prompts or a list with one for"):
            priorities(given, 2)


class Engine:
    """Engine that reads at most two prompts that have not ended; queued ones end at once.

    Attributes:
        queued: the prompts of each time that some were queued.
    """

    def __init__(self) -> None:
        self.queued: list[list[str]] = []
        self.num_unfinished, self.arch = 0, SimpleNamespace(pooler=None)
        self.host = SimpleNamespace(check_serve=lambda: None)
        self.reader, self.frontend = SimpleNamespace(read=self.read), SimpleNamespace(cancel=lambda request_id: None)

    def read(self, request_id: str, prompt: str, *_: Any, **options: Any) -> Any:
        if self.num_unfinished == 2 or prompt == "too large":
            raise BusyError("must wait")
        self.num_unfinished += 1
        output = SimpleNamespace(prompt=prompt, prompt_token_ids=[1], outputs=[], finished=True)
        return SimpleNamespace(request_id=request_id, output=output, check_served=lambda: None)

    def submit(self, groups: list[Any], listener: Callable[[Any], None]) -> None:
        self.queued.append([group.output.prompt for group in groups])
        for group in groups:
            self.num_unfinished -= 1
            listener(group)


def test_prompts_wait_for_those_whose_pictures_take_the_memory() -> None:
    engine: Any = Engine()
    calls = Calls(engine, engine)
    prompts = ["a", "b", "c", "d", "e"]
    outputs = calls.run(prompts, [SamplingParams()] * 5, False)
    assert [output.prompt for output in outputs] == prompts
    assert engine.queued == [["a", "b"], ["c", "d"], ["e"]]
    with pytest.raises(BusyError, match="prompt 1: must wait"):
        calls.run(["a", "too large"], [SamplingParams()] * 2, False)

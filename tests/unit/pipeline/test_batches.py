"""What a step is given, turned into microbatches: by name, tree by tree, cut, ready, or refused;
what a stage returns, and the header of what it sends.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipegrad import Stage, Topology
from pipegrad.errors import StepError
from pipegrad.interop.private import flat
from pipegrad.pipeline.batch import Batch, Batches, Given
from pipegrad.pipeline.compare import BatchCheck
from pipegrad.pipeline.edges import Spec, header, read_header
from pipegrad.pipeline.stage import BatchRules
from pipegrad.pipeline.transfers import Sizes
from pipegrad.pipeline.wiring import REST, wire

ONE = wire({0: (("x",), ("x",), ()), 1: (("x",), ("x",), ())})
TWO = wire({0: (("x", "mask"), ("x",), ()), 1: (("x",), ("x",), ())})
ROWS = 5


def batches(
    wiring: Any = ONE, *, stages: Any = range(2), whole: tuple[str, ...] = (), **rules: Any
) -> Batches:
    return Batches(wiring, stages, rules=BatchRules(**rules), has_loss=True, whole=whole)


def given_by(
    batches: Batches, *inputs: Any, number: int = 2, needs_target: bool = False, **options: Any
) -> Given:
    own = {
        name: options.pop(name, None)
        for name in ("target", "loss_divisor", "microbatches", "num_microbatches", "rows_of")
    }
    batch = Batch(inputs, options, **own, keeps_outputs=False)
    return batches.cut(batch, number, needs_target=needs_target)


def cut(batches: Batches, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Returns the microbatches by name, with those of the target."""
    found = given_by(batches, *inputs, **options)
    return found.inputs | ({} if found.targets is None else {"target": found.targets})


def rows(number: int = ROWS, seed: int = 0) -> Tensor:
    return torch.arange(number * 2.0).reshape(number, 2) + 100 * seed


# Trees.


class Pair(NamedTuple):
    left: Any
    right: Any


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=6,
    )


def shaped(shape: tuple[int, ...]) -> Callable[[int], Tensor]:
    return lambda number: torch.randn(number, *shape)


tensors = st.sampled_from([shaped(()), shaped((2,)), shaped((3, 1))])
others = st.sampled_from([None, 3, 0.5, "word", torch.tensor(2.0)])


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(0, 9))
def test_each_tensor_of_a_tree_is_cut_as_tensor_split_does(
    data: st.DataObject, number: int, more: int
) -> None:
    made = tensors.map(lambda make: make(number + more))
    tree = data.draw(trees(st.one_of(made, st.tuples(made, others))))

    (parts,) = cut(batches(), x=tree, number=number).values()

    leaves, _ = flat(tree)
    columns = zip(*(flat(part)[0] for part in parts), strict=True)
    for (path, leaf), column in zip(leaves, columns, strict=True):
        assert {name for name, _ in column} == {path}
        if isinstance(leaf, Tensor) and leaf.dim():
            wanted = leaf.tensor_split(number)
            assert all(
                torch.equal(part, right) for (_, part), right in zip(column, wanted, strict=True)
            )
        else:
            assert all(part is leaf for _, part in column)
    assert all(type(part) is type(tree) for part in parts)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_gradients_flow_into_the_graph_of_every_tensor_of_a_tree(
    data: st.DataObject, number: int, more: int, ready: bool
) -> None:
    """Each tensor comes from a graph that can be run once only."""
    made = tensors.map(lambda make: make(number + more).requires_grad_())
    tree = data.draw(trees(made))
    (leaves, rebuilt), batch = flat(tree), batches()
    inner = rebuilt([leaf.exp() for _, leaf in leaves])  # type: ignore[attr-defined]
    if ready:  # all of it in each microbatch
        parts = cut(batch, microbatches=[{"x": inner}] * number, number=number)["x"]
    else:
        parts = cut(batch, x=inner, number=number)["x"]

    for part in parts:
        for _, leaf in flat(part)[0]:
            leaf.square().sum().backward()  # type: ignore[attr-defined]
    batch.outer.backward(1.0)

    times = number if ready else 1
    for _, leaf in leaves:
        assert isinstance(leaf, Tensor)
        torch.testing.assert_close(leaf.grad, 2 * times * leaf.detach().exp().square())
    assert not batch.outer.leaves


def test_what_a_tree_holds_is_reported_by_path_and_what_is_whole_is_one_object() -> None:
    batch, cache = batches(TWO, whole=("mask",)), {"a": rows(3)}
    found = given_by(batch, x={"ids": rows(), "scale": 2.0}, mask=cache, target=[rows()])
    assert all(part is cache for part in found.inputs["mask"])
    assert found.report == {
        "x['ids']": "5 rows, cut into 2 microbatches of 2 to 3",
        "x['scale']": "whole in every microbatch",
        "mask": "whole in every microbatch",
        "target[0]": "5 rows, cut into 2 microbatches of 2 to 3",
    }
    assert cut(batch, microbatches=[{"x": X}, {"x": Y}], mask=MASK)["mask"] == [MASK, MASK]
    # A mapping that torch does not know is cut as a dict.
    parts = cut(batches(), x=rows(), target=UserDict(labels=rows()))["target"]
    assert [list(part) for part in parts] == [["labels"]] * 2
    assert torch.equal(torch.cat([part["labels"] for part in parts]), rows())


def test_a_tensor_of_one_row_beside_others_goes_whole_to_every_microbatch() -> None:
    wiring = wire({0: ((REST,), ("x",), ()), 1: (("x",), ("y",), ())})
    table = torch.ones(1, 3)
    parts = cut(batches(wiring), {"x": rows(4), "positions": table})[REST]
    assert [tuple(part["x"].shape) for part in parts] == [(2, 2), (2, 2)]
    assert all(part["positions"] is table for part in parts)
    parts = cut(batches(wiring), {"x": rows(2), "mask": rows(2, seed=1)})[REST]  # as others are
    assert [tuple(part["mask"].shape) for part in parts] == [(1, 2), (1, 2)]


# By name.


@dataclass
class Data:
    x: Tensor
    mask: Tensor


class InOrder(NamedTuple):
    first: Tensor
    second: Tensor


class OtherWay(NamedTuple):
    mask: Tensor
    x: Tensor


X, MASK = rows(), rows(seed=1)
SPELLINGS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by position": ((X, MASK), {}),
    "by name": ((), {"x": X, "mask": MASK}),
    "a tuple": (((X, MASK),), {}),
    "a list": (([X, MASK],), {}),
    "a dict": (({"x": X, "mask": MASK},), {}),
    "a UserDict": ((UserDict(mask=MASK, x=X),), {}),
    "a dict and a name": (({"x": X},), {"mask": MASK}),
    "a dataclass": ((Data(X, MASK),), {}),
    "a named tuple of other names": ((InOrder(X, MASK),), {}),
    "a named tuple": ((OtherWay(MASK, X),), {}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_inputs_may_be_given_in_many_ways(spelling: str) -> None:
    inputs, named = SPELLINGS[spelling]

    parts = cut(batches(TWO), *inputs, **named)

    assert torch.equal(torch.cat(parts["x"]), X)
    assert torch.equal(torch.cat(parts["mask"]), MASK)


Y = rows(seed=2)
WITH_TARGET: dict[str, Callable[[], dict[str, Any]]] = {
    "in the mapping": lambda: {"only": {"x": X, "target": Y}},
    "beside it": lambda: {"only": {"x": X}, "target": Y},
    "under its own name": lambda: {"only": {"x": X, "labels": Y}, "target": Y},
    "in a tree": lambda: {"only": {"x": X, "labels": Y}, "target": {"labels": Y}},
}


@pytest.mark.parametrize("how", WITH_TARGET)
def test_a_mapping_may_hold_what_the_loss_gets(how: str) -> None:
    options = WITH_TARGET[how]()

    found = cut(batches(), options.pop("only"), needs_target=True, **options)["target"]

    assert torch.equal(torch.cat([flat(part)[0][0][1] for part in found]), Y)  # type: ignore[misc]


nested = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)

REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a list of numbers in a tree": (
        lambda: {"x": {"ids": rows(), "lengths": [1, 2, 3]}},
        "the input \"x['lengths']\" is a list, expected a tensor",
    ),
    "a target of numpy": (
        lambda: {"x": rows(), "target": {"y": np.ones(ROWS)}},
        "the target['y'] is a ndarray",
    ),
    "a dataclass in a tree": (lambda: {"x": {"a": Data(X, MASK)}}, "is a Data, expected a tensor"),
    "nested": (lambda: {"x": nested}, "of layout torch.jagged, which cannot be cut into"),
    "other rows in a tree": (
        lambda: {"x": {"a": rows(4), "b": rows(6)}},
        "'b']\": 6} rows cannot be cut into 2 microbatches that belong together: give all",
    ),
    "fewer rows": (lambda: {"x": rows(1)}, "with drop_last=True leaves a last batch"),
    "texts": (lambda: {"x": {"text": [["a"]]}}, "such as texts, drop the column"),
    "a mapping of other names": (
        lambda: {"only": {"ids": rows(), "text": "a"}},
        "no stage takes ['ids', 'text']; from outside they take ['x']. A mapping alone gives",
    ),
    "a misspelt option": (lambda: {"x": X, "taget": Y}, "step() itself, closest first: target, "),
    "keys that are no strings": (lambda: {"only": {0: rows()}}, "no stage takes [0]"),
    "a pair of input and target": (
        lambda: {"only": (rows(), rows())},
        "2 inputs, expected at most ['x']; the loss gets target=",
    ),
    "a name twice": (lambda: {"only": {"x": X}, "x": X}, "inputs ['x'] are given twice"),
    "a target twice": (
        lambda: {"only": {"x": X, "target": Y}, "target": Y},
        "inputs ['target'] are given twice",
    ),
    "a dict of no input, ready": (
        lambda: {"microbatches": [{"x": X}, {"y": X}]},
        "microbatch 1: no stage takes ['y']",
    ),
    "labels of a ready one by another name": (
        lambda: {"microbatches": [{"x": X, "labels": Y}]},
        "in a ready microbatch it is 'target', whatever a loader calls it",
    ),
    "a ready one without a target": (
        lambda: {"microbatches": [{"x": X, "target": Y}, {"x": X}]},
        "microbatch 1: all microbatches have the same inputs, and a target or none",
    ),
    "a tensor of microbatches": (lambda: {"microbatches": rows()}, "is a Tensor, expected a list"),
    "two numbers": (
        lambda: {"microbatches": [{"x": X}, {"x": X}], "num_microbatches": 3},
        "2 microbatches, and num_microbatches is 3",
    ),
    "an input beside ready ones": (
        lambda: {"only": X, "microbatches": [{}, {}]},
        "inputs beside microbatches=: put into each microbatch what is for it",
    ),
    "a target beside ready ones": (
        lambda: {"target": Y, "microbatches": [{"x": X}, {"x": X}]},
        "['target'] beside microbatches=",
    ),
    "counts that are no mapping": (lambda: {"x": X, "rows_of": [1]}, "rows_of is a list, expected"),
    "counts of what no stage takes": (
        lambda: {"x": X, "rows_of": {"y": [1]}},
        "rows_of has 'y', which no stage takes; from outside they take ['x']",
    ),
    "counts below nought": (
        lambda: {"x": X, "rows_of": {"x": [6, -1]}},
        "rows_of['x'] is [6, -1], expected an integer from 0 for each sample",
    ),
    "counts that do not add up": (
        lambda: {"x": X, "rows_of": {"x": [2, 2]}},
        "rows_of['x'] adds up to 4, and the tensor has 5 rows",
    ),
    "counts of fewer samples": (
        lambda: {"x": X, "target": Y, "rows_of": {"x": [2, 3]}},
        "rows_of['x'] has 2 numbers, and the batch has 5 samples",
    ),
}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 9))
def test_rows_that_are_no_samples_are_cut_where_samples_are(counts: list[int], number: int) -> None:
    """Their gradients come back whole, also if a microbatch has none of them."""
    number = min(number, len(counts))
    images = torch.randn(sum(counts), 2, requires_grad=True)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    batch = batches()
    found = given_by(
        batch,
        x={"images": images.exp(), "owner": owner},
        target=torch.arange(len(counts)),
        number=number,
        rows_of={"x['images']": counts, "x['owner']": torch.tensor(counts)},
    )
    assert found.targets is not None
    for part, samples in zip(found.inputs["x"], found.targets, strict=True):
        assert len(part["images"]) == len(part["owner"])
        assert set(part["owner"].tolist()) <= set(samples.tolist())
        part["images"].square().sum().backward()
    assert torch.equal(torch.cat([part["owner"] for part in found.inputs["x"]]), owner)
    batch.outer.backward(1.0)
    if counts != [0] * len(counts):
        torch.testing.assert_close(images.grad, 2 * images.detach().exp().square())
    assert found.rows == len(counts)


def test_one_row_beside_samples_may_be_of_one_of_them() -> None:
    wiring = wire({0: (("**batch",), ("x",), ()), 1: (("x", "**batch"), ("x",), ())})
    batch = batches(wiring, rows_of=lambda _: {"image": [0, 1]})
    found = given_by(batch, {"ids": rows(2), "image": rows(1), "mask": rows(1)})
    parts = found.inputs["**batch"]
    assert [len(part["image"]) for part in parts] == [0, 1]
    assert [len(part["mask"]) for part in parts] == [1, 1]
    assert found.report["image"] == "1 rows, cut into 2 microbatches of 0 to 1"


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_belong_to_one_sample_or_to_no_stage_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    options = make()
    inputs = [options.pop("only")] if "only" in options else []

    with pytest.raises(StepError, match=re.escape(words)):
        cut(batches(), *inputs, **options)


def test_a_cut_model_is_given_what_its_forward_takes_and_nothing_else() -> None:
    wiring = wire({0: (("**batch",), ("x",), ()), 1: (("x", "**batch"), ("x",), ())})
    own, any_ = (batches(wiring, accepts=accepts) for accepts in (("x", "scale"), None))
    given = {"x": X, "labels": Y}
    # The call of docs/scheduler.md: labels that are the target are for nobody else.
    assert cut(own, given, target=Y)["**batch"][0].keys() == {"x"}
    assert cut(any_, given, target=Y)["**batch"][0].keys() == {"x", "labels"}
    words = "no stage takes ['labels']; from outside they take ['scale', 'x']"
    refused: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((given,), {"target": X.clone()}),
        ((), {"target": Y, **given}),
        ((), {"microbatches": [{"x": X}, given]}),
    ]
    for inputs, named in refused:
        with pytest.raises(StepError, match=re.escape(words)):
            cut(own, *inputs, **named)
    assert cut(own, {"x": X, "scale": 2.0, "target": Y})["**batch"][1]["scale"] == 2.0


# Ready.


class Mask:
    """A value of no type that anybody knows, such as a block mask."""


def test_ready_microbatches_are_given_as_they_are() -> None:
    masks = [Mask(), Mask(), None]
    given = [{"x": rows(n), "mask": mask} for n, mask in zip((1, 0, 7), masks, strict=True)]

    found = given_by(batches(TWO), microbatches=given, number=3)

    parts = found.inputs
    assert all(part is one["x"] for part, one in zip(parts["x"], given, strict=True))
    assert all(part is mask for part, mask in zip(parts["mask"], masks, strict=True))
    assert set(found.report.values()) == {"as given in each of 3 microbatches"}
    assert found.rows is None
    assert cut(batches(), microbatches=[X, Y])["x"] == [X, Y]
    parts = cut(batches(TWO), microbatches=[(X, MASK), [Y, MASK]])
    assert (parts["x"][1] is Y, parts["mask"][1] is MASK) == (True, True)


def test_a_rank_that_needs_nothing_may_give_nothing() -> None:
    wiring = wire({0: (("x",), ("x",), ()), 1: (("x",), ("x",), ()), 2: (("x",), ("x",), ())})
    middle = batches(wiring, stages=[1])

    given_ready: list[list[Any]] = [[{}, None], [{"x": X, "target": Y}] * 2, [None, None]]
    for ready in given_ready:
        assert cut(middle, microbatches=ready, needs_target=True) == {}
    assert cut(middle, num_microbatches=2, needs_target=True) == {}


TABLE, FILLED, PAIRS = rows(4), rows(4), [rows(4, seed=i) for i in range(10)]
SAME: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "a table": (lambda i: {"x": rows(4, seed=i), "mask": TABLE}, "with whole=('mask',)"),
    "a table in a tree": (
        lambda i: {"x": {"ids": rows(4, seed=i), "rope": TABLE}},
        "give it by a name of its own, and make the Scheduler with whole=",
    ),
    "a table beside labels": (lambda i: {"target": {"y": rows(4, seed=i), "w": TABLE}}, "'w'"),
    "a GAN that takes a batch twice": (lambda i: {"x": PAIRS[i // 2], "mask": rows(4, seed=i)}, ""),
    "a critic's five steps": (lambda i: {"x": rows(4, seed=i), "mask": PAIRS[i // 6]}, ""),
    "the whole data, labels of a teacher": (lambda i: {"x": TABLE, "target": rows(4, seed=i)}, ""),
    "a buffer that is filled": (lambda i: {"x": rows(4, seed=i), "mask": FILLED.add_(1)}, ""),
}


@pytest.mark.parametrize("name", SAME)
def test_a_table_that_is_cut_though_all_steps_have_the_same_is_warned_of_once(name: str) -> None:
    given, words = SAME[name]
    batch = batches(TWO, stages=[1] if "beside" in name else [0])
    check = BatchCheck(Topology((("pp", 2),), (0, 1), (0, 1), 0), timeout_seconds=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(18):
            found = given_by(batch, **{"mask": None, **given(step)})
            if not step & (step + 1):  # those in which ranks compare
                check.look_for_tables(found.passed, found.cut)
    assert [words in str(warning.message) for warning in caught] == [True] * bool(words)


# What a stage returns.


class ModelOutput(OrderedDict[str, Any]):
    """Has parts by name and, as that of transformers, leaves out None."""


@dataclass
class Output:
    logits: Any
    loss: Any = None
    hidden: Any = None


class Named(NamedTuple):
    loss: Any
    logits: Any


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def forward(self, x: Tensor) -> Any:
        return self._value


def returned(value: Any, *outputs: str) -> tuple[Tensor, ...]:
    return Stage(Returns(value), 3, outputs=outputs).forward([X])


RETURNED: dict[str, tuple[Any, ...]] = {
    "a tensor": (X,),
    "a list": ([X],),
    "None and numbers behind it": ((X, None, 3, "word", (Y, Y)),),
    "a dict of more": ({"hidden": Y, "logits": X, "loss": None},),
    "a ModelOutput": (ModelOutput(loss=Y, logits=X),),
    "a dataclass": (Output(X, hidden=(Y, Y)),),
    "a named tuple": (Named(Y, X),),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_stage_may_return_more_than_its_outputs(case: str) -> None:
    (output,) = returned(*RETURNED[case], "logits")

    assert output is X


def test_a_named_tuple_gives_outputs_by_name_and_not_in_its_own_order() -> None:
    logits, loss = returned(Named(loss=Y, logits=X), "logits", "loss")
    assert logits is X
    assert loss is Y


NOT_RETURNED: dict[str, tuple[Any, str]] = {
    "another tensor": ((X, Y), "returned ['Tensor', 'Tensor']"),
    "None before it": ((None, X), "returned ['NoneType', 'Tensor']"),
    "a dict of None": ({"logits": None}, "returned {'logits': 'NoneType'}"),
    "a dataclass of None": (Output(None, X), "'logits': 'NoneType', 'loss': 'Tensor'"),
}


@pytest.mark.parametrize("case", NOT_RETURNED)
def test_an_output_that_is_missing_or_no_tensor_is_refused_by_name(case: str) -> None:
    value, words = NOT_RETURNED[case]

    with pytest.raises(StepError, match=re.escape(words)) as caught:
        returned(value, "logits")
    assert str(caught.value).startswith("stage 3 returned")


# What crosses an edge: a header says what follows.


def test_a_header_has_the_bytes_that_all_versions_agree_on() -> None:
    for has_gradient in (False, True):
        spec = Spec((3, 5), torch.complex128, differentiable=has_gradient)
        assert header(3, (7, 9), spec).nbytes == 152
        assert read_header(3, header(3, (7, 9), spec).tolist()) == ((7, 9), spec)
    assert read_header(3, header(3, (7, 9), None).tolist()) == ((7, 9), None)


@pytest.mark.parametrize(
    ("at", "number"),
    [(0, 2), (0, 4), (3, -2), (3, 19), (4, 2), (5, -1), (5, 14), (6, -1), (8, 1)],
    ids=[
        "a step ago",
        "the next step",
        "dtype -2",
        "dtype 19",
        "two gradients",
        "-1 sizes",
        "14 sizes",
        "size -1",
        "size behind",
    ],
)
def test_a_header_that_no_value_has_is_refused(at: int, number: int) -> None:
    """A dtype's number was taken from the end, and 14 sizes were taken from 13."""
    head = header(3, (7, 9), Spec((3, 5), torch.float32, differentiable=True))
    head[at] = number
    with pytest.raises(StepError, match="another rank has sent a header that no value has"):
        read_header(3, head.tolist())


def test_a_value_is_refused_before_memory_is_made_if_it_is_far_larger_than_all_before() -> None:
    sizes = Sizes(Spec((2**20,), torch.float32, differentiable=True))
    sizes.check_size(Spec((2**30,), torch.float32, differentiable=True))
    with pytest.raises(StepError, match=r"4294967300 bytes, .*: expected at most 4294967296"):
        sizes.check_size(Spec((2**30 + 1,), torch.float32, differentiable=True))
    small = Sizes(Spec((), torch.uint8, differentiable=True))
    small.check_size(Spec((2**30,), torch.uint8, differentiable=True))
    with pytest.raises(StepError, match="expected at most 1073741824"):
        small.check_size(Spec((2**33,), torch.uint8, differentiable=True))

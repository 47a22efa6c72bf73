"""What one process computes, beside plain autograd of the same model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.audit.truth import (
    BEFORE,
    BEHIND,
    WHOLE,
    Batch,
    Data,
    LossFn,
    Truth,
    cast,
    compute,
    leaves_cut,
    sampled,
)
from pipegrad.errors import PlanError

REPLICAS, MICROBATCHES, ROWS, WIDTH = 2, 3, 12, 4


class Tied(nn.Module):
    """An embedding and a head with one weight, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return self.head(self.again(hidden))  # type: ignore[no-any-return]


class Sum(nn.Module):
    """Takes two tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale + shift  # type: ignore[no-any-return]


def seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


def random(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=-100)


def cut(batch: Batch) -> list[list[Batch]]:
    shares = zip(*(leaves_cut(value, REPLICAS) for value in batch), strict=True)
    return [
        list(zip(*(leaves_cut(value, MICROBATCHES) for value in share), strict=True))
        for share in shares
    ]


def truth_of(
    model: nn.Module, batch: Batch, loss_fn: LossFn = square, *, by_microbatch: bool = False
) -> Truth:
    return compute(model, Data(loss_fn, cut(batch), batch, by_microbatch), dtypes_of(model))


def assert_parts_make_the_whole(truth: Truth) -> None:
    for name, views in truth.parts(list(truth.gradients)).items():
        whole = views[WHOLE].sum((0, 1, 2, 3))
        torch.testing.assert_close(whole, truth.gradients[name].reshape(-1), rtol=1e-9, atol=1e-12)


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def by_autograd(
    model: nn.Module, batches: Sequence[Batch], loss_fn: LossFn = square
) -> dict[str, Tensor]:
    """Returns the mean of the gradients of batches, by plain autograd."""
    own = copy.deepcopy(model)
    for inputs, target in batches:
        (loss_fn(own(inputs), target) / len(batches)).backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def tokens() -> Batch:
    generator = torch.Generator().manual_seed(2)
    inputs, target = torch.randint(5, (2, ROWS), generator=generator)
    return inputs, target


def numbers() -> Batch:
    return random(ROWS, WIDTH), random(ROWS, WIDTH, seed=3)


def test_gradient_and_losses_are_those_of_the_whole_batch_and_its_parts() -> None:
    model, batch = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), numbers()
    truth = truth_of(model, batch)
    assert_equal(truth.gradients, by_autograd(model, [batch]))
    assert_parts_make_the_whole(truth)
    assert truth.loss == pytest.approx(square(model(batch[0]), batch[1]).item())
    expected = [[square(model(x), y).item() for x, y in row] for row in cut(batch)]
    torch.testing.assert_close(truth.losses, torch.tensor(expected).double())
    assert not truth.is_coupled
    rows = [batch[0][: ROWS // 2], batch[1][: ROWS // 2]]
    assert float(truth.own[0]) == pytest.approx(square(model(rows[0]), rows[1]).item())
    parts = truth.parts(["0.bias"])
    assert parts.keys() == {"0.bias"}
    assert parts["0.bias"].keys() > {WHOLE, BEFORE, BEHIND}
    assert parts["0.bias"][WHOLE].shape == (REPLICAS, MICROBATCHES, 1, 1, WIDTH)
    one = by_autograd(model, [cut(batch)[0][2]])["0.bias"]
    torch.testing.assert_close(parts["0.bias"][WHOLE][0, 2, 0, 0], one / 6)
    one = by_autograd(model, [(cut(batch)[0][2][0], cut(batch)[0][1][1])])["0.bias"]
    torch.testing.assert_close(parts["0.bias"][BEFORE][0, 2, 0, 0], one / 6)


def balanced(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output[0], target) + 0.3 * output[1]


class Balanced(Tied):
    """Has a balance loss beside its logits, a mean over all tokens or over those below 3."""

    counts_few = False

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        few = hidden[tokens < 3] if self.counts_few else hidden
        return self.head(self.again(hidden)), few.square().mean()


@pytest.mark.parametrize("counts_few", [False, True])
def test_terms_of_different_denominators_have_parts_of_their_own(counts_few: bool) -> None:
    model, (inputs, target) = seeded(Balanced()), tokens()
    assert isinstance(model, Balanced)
    model.counts_few = counts_few
    target[:3], target[1] = -100, 4
    truth = truth_of(model, (inputs, target), balanced)
    assert truth.terms == ("[0]", "[1]")
    assert_equal(truth.gradients, by_autograd(model, [(inputs, target)], balanced))
    # A balance loss whose denominator is not known is no sum of parts.
    assert truth.is_coupled == counts_few
    if not counts_few:
        assert_parts_make_the_whole(truth)


class Squared(Tied):
    """Has a loss beside its logits whose gradient of the batch is a weighed mean, by chance."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return self.head(self.again(hidden)), hidden.mean().square()


@pytest.mark.parametrize("is_whole", [False, True])
def test_microbatches_by_themselves_weigh_alike_where_other_weights_make_the_batch(
    is_whole: bool,
) -> None:
    model, batch = seeded(Squared()), tokens()
    truth = truth_of(model, batch, balanced, by_microbatch=not is_whole)
    cells = [one for row in cut(batch) for one in row]
    assert_equal(truth.gradients, by_autograd(model, [batch] if is_whole else cells, balanced))


class Loss(nn.Module):
    """A model that returns its loss, in an object that cannot be taken apart."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, tokens: Tensor, target: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.loss_fn(self.model(tokens), target))


def test_an_output_that_cannot_be_taken_apart_is_refused() -> None:
    inputs, target = tokens()
    model = Loss(seeded(Tied()), cross_entropy)
    with pytest.raises(
        PlanError, match=r"the output of the uncut model, \['SimpleNamespace'\], ca"
    ):
        truth_of(model, ((inputs, target), target), lambda output, _: output.loss)


@pytest.mark.parametrize("is_whole", [False, True])
def test_batch_norm_couples_samples_in_training_alone_and_the_model_is_not_changed(
    is_whole: bool,
) -> None:
    """The truth is that of the whole batch, unless the caller wants microbatches by themselves."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    model.register_buffer("constant", torch.ones(2, dtype=torch.float64))
    before, batch = copy.deepcopy(model.state_dict()), numbers()
    truth = truth_of(model, batch, by_microbatch=not is_whole)
    assert truth.is_coupled == is_whole
    cells = [one for row in cut(batch) for one in row]
    assert_equal(truth.gradients, by_autograd(model, [batch] if is_whole else cells))
    right = square(model(batch[0]), batch[1]).item() if is_whole else float(truth.losses.mean())
    model.load_state_dict(before)
    assert truth.loss == pytest.approx(right)
    # Buffers are those after the microbatches of each replica, without what stays.
    for row, found in zip(cut(batch), truth.buffers, strict=True):
        own = copy.deepcopy(model)
        for inputs, _ in row:
            own(inputs)
        assert_equal(found, {n: value for n, value in own.named_buffers() if n != "constant"})
        assert found["1.num_batches_tracked"] == MICROBATCHES

    truth = truth_of(model.eval(), batch)
    assert not truth.is_coupled
    assert truth.buffers == [{}, {}]
    assert_equal(truth.gradients, by_autograd(model, [batch]))
    assert_equal(dict(model.state_dict()), dict(before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_of_a_tie_are_those_of_its_uses() -> None:
    model, batch = seeded(Tied()), tokens()
    truth = truth_of(model, batch, cross_entropy)
    assert_equal(truth.gradients, by_autograd(model, [batch], cross_entropy))
    assert truth.uses == {
        "embedding.weight": ("embedding.weight", "head.weight"),
        "layer.weight": ("layer.weight", "again.weight"),
        "layer.bias": ("layer.bias", "again.bias"),
    }
    assert_parts_make_the_whole(truth)
    # A module that is used twice has all in its first use.
    parts = truth.parts(["layer.weight"])["layer.weight"][WHOLE]
    expected = by_autograd(model, [cut(batch)[0][1]], cross_entropy)
    torch.testing.assert_close(parts[0, 1, 0, 0] * 6, expected["layer.weight"].reshape(-1))
    assert not parts[:, :, :, 1].any()


def test_parameters_that_are_not_used_have_zeros_and_more_than_a_loss_is_left_out() -> None:
    model, batch = seeded(Sum()), numbers()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    inputs = batch[0], batch[1]
    truth = truth_of(model, (inputs, batch[1]), lambda out, target: (square(out, target), "more"))
    assert torch.equal(truth.gradients["unused"], torch.zeros(3, dtype=torch.float64))
    assert_equal(truth.gradients, truth_of(model, (inputs, batch[1])).gradients)


@pytest.mark.parametrize(
    "inputs",
    [
        (random(ROWS, WIDTH), random(1, WIDTH, seed=4), 2.0),
        [random(ROWS, WIDTH), random(1, WIDTH, seed=4), 2.0],
        {"scale": 2.0, "x": random(ROWS, WIDTH), "shift": random(1, WIDTH, seed=4)},
    ],
    ids=["a tuple", "a list", "a dict"],
)
def test_inputs_of_many_kinds(inputs: Any) -> None:
    model, target = seeded(Sum()), random(ROWS, WIDTH, seed=3)
    names = "x", "shift", "scale"
    values = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
    own = copy.deepcopy(model)
    square(own(**values), target).backward()
    expected = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    truth = truth_of(model, (inputs, target))
    assert_equal(truth.gradients, expected)
    assert not truth.is_coupled


def test_the_noise_is_that_of_a_dtype() -> None:
    model, batch = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), numbers()

    def noise(dtype: torch.dtype, autocast: torch.dtype | None = None, **more: Any) -> Any:
        dtypes = dict.fromkeys(dtypes_of(model), dtype) | more
        return compute(model, Data(square, cut(batch), batch), dtypes, autocast).noise

    assert max(noise(torch.float64).values()) < 1e-14
    small, large = noise(torch.float32), noise(torch.bfloat16)
    assert small.keys() == large.keys() == {"0.weight", "0.bias"}
    for name, value in small.items():
        assert 0 < value < 1e-5
        assert 1e-4 < large[name] < 0.1
    assert min(noise(torch.float32, torch.bfloat16).values()) > 1e-4  # of autocast
    # One process cannot compute in two dtypes.
    assert noise(torch.float32, **{"0.weight": torch.bfloat16}) == {}


def test_trees_are_cut_along_the_first_dimension_and_their_numbers_become_float64() -> None:
    row, scalar, six = torch.ones(1, 4), torch.tensor(2.0), torch.arange(6)
    value = {"x": six[:, None], "more": (six, row, scalar), "mode": "sum", "mask": None}
    for number, part in enumerate(leaves_cut(value, 3)):
        rows = six[2 * number : 2 * number + 2]
        assert torch.equal(part["x"], rows[:, None])
        assert torch.equal(part["more"][0], rows)
        # A tensor of one row goes whole into each, and so does what is no tensor.
        assert part["more"][1] is row
        assert part["more"][2] is scalar
        assert (part["mode"], part["mask"]) == ("sum", None)
    assert leaves_cut(None, 3) == [None, None, None]
    inputs, target = cast(({"x": torch.ones(2), "scale": 2.0}, torch.ones(2).long()), torch.float64)
    assert (inputs["x"].dtype, inputs["scale"], target.dtype) == (torch.float64, 2.0, torch.int64)


def test_large_gradients_are_looked_at_in_part() -> None:
    large = torch.arange(3 * 16384 + 5)
    assert 16384 <= sampled(large).numel() <= 2 * 16384
    assert torch.equal(sampled(large[:7]), large[:7])

"""Nothing is dropped wherever torch's functions are called, and it is known whether it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipegrad.audit.dropout import Without

X = torch.linspace(1, 2, 64).reshape(1, 4, 4, 4)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "by position": lambda x: functional.dropout(x, 0.5),
    "by position with training": lambda x: functional.dropout(x, 0.5, True, False),
    "by keyword": lambda x: functional.dropout(x, p=0.5),
    "all by keyword": lambda x: functional.dropout(input=x, p=0.5, training=True),
    "by default": lambda x: functional.dropout(x, inplace=False),
    "by default with training": lambda x: functional.dropout(x, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "torch.dropout by keyword": lambda x: torch.dropout(x, p=0.5, train=True),
    "functional.dropout1d": lambda x: functional.dropout1d(x[0], 0.5),
    "functional.dropout2d": lambda x: functional.dropout2d(x, 0.5),
    "functional.dropout3d": lambda x: functional.dropout3d(x, 0.5),
    "functional.alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "functional.feature_alpha_dropout": (
        lambda x: functional.feature_alpha_dropout(x, 0.5, training=True)
    ),
    "nn.Dropout": nn.Dropout(0.5),
    "attention by keyword": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    ),
    "attention by position": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, None, 0.5)
    ),
    "nn.MultiheadAttention": lambda x: ATTENTION(x[0], x[0], x[0], need_weights=False)[0],
}
WITHOUT = nn.MultiheadAttention(4, 2, batch_first=True)
WITHOUT.load_state_dict(ATTENTION.state_dict())
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "functional.dropout1d": lambda x: x[0],
    "attention by keyword": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "attention by position": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "nn.MultiheadAttention": lambda x: WITHOUT(x[0], x[0], x[0], need_weights=False)[0],
}
# What drops nothing by itself.
PASSIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "by position in evaluation": lambda x: functional.dropout(x, 0.5, False),
    "by keyword in evaluation": lambda x: functional.dropout(x, training=False),
    "with a probability of 0": nn.Dropout(0.0),
    "torch.dropout in evaluation": lambda x: torch.dropout(x, 0.5, False),
    "torch.dropout by keyword in evaluation": lambda x: torch.dropout(x, p=0.5, train=False),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention with a probability of 0": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, None, 0.0)
    ),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_dropped_until_it_has_ended(name: str) -> None:
    dropout, expected = Without(), RIGHT[name](X) if name in RIGHT else X
    with dropout.running():
        assert torch.equal(CALLS[name](X), expected)
    assert dropout.dropped
    assert not torch.equal(CALLS[name](X), expected)
    with dropout.running():
        functional.dropout(X, 0.375, training=False)
        functional.dropout(X, 0.625)
    assert 0.625 in dropout.dropped  # and earlier runs are remembered
    assert len(dropout.dropped) == 2


@pytest.mark.parametrize("name", PASSIVE)
def test_what_drops_nothing_is_not_active(name: str) -> None:
    dropout, expected = Without(), PASSIVE[name](X)
    with dropout.running():
        assert torch.equal(PASSIVE[name](X), expected)
    assert not dropout.dropped


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_nothing_between_them(kind: Any) -> None:
    model, x = kind(3, 4, num_layers=2, dropout=0.5), torch.randn(5, 2, 3)
    dropout = Without(model.modules())
    with dropout.running():
        assert torch.equal(*(model(x)[0] for _ in range(2)))
    assert dropout.dropped == {0.5}
    assert not torch.equal(*(model(x)[0] for _ in range(2)))


def test_packed_sequences_and_recomputation_in_a_backward_drop_nothing() -> None:
    model = nn.GRU(3, 4, num_layers=2, dropout=0.25)
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.5, batch_first=True)
    x, dropout = X[0].clone().requires_grad_(), Without(model.modules())
    with dropout.running():
        assert torch.equal(*(model(packed)[0].data for _ in range(2)))
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert dropout.dropped == {0.25, 0.5}
    found, x.grad = x.grad, None
    for part in layer.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    layer.self_attn.dropout = 0.0
    layer(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_it_drops_again_after_an_error() -> None:
    def fails() -> None:
        with Without().running():
            assert torch.equal(functional.dropout(X, 0.5), X)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not torch.equal(functional.dropout(X, 0.5), X)


def test_a_traced_module_drops_again_afterwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    traced = torch.export.export(model, (torch.randn(2, 4),), strict=False).module()
    x = torch.randn(2, 4)
    without = Without(traced.modules())
    with without.running():
        assert torch.equal(traced(x), model[0](x))
    assert without.dropped
    assert not torch.equal(traced(x), traced(x))

"""Pairs: what a user's function may return as a batch, as inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Inputs = Tensor | Mapping[str, Tensor]  # of a model of transformers by name
Pair = tuple[Inputs, Tensor]

INPUT_IDS = "input_ids"
IGNORED = -100  # a target that the loss leaves out
_LABELS = "labels"
_TARGETS = ("target", "targets", _LABELS)
# Integers that torch takes neither as indices nor as classes.
_SMALL = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)


def named_pair_of(batch: object) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the inputs of a model of transformers by name, and targets.

    Args:
        batch: As `pair_of`; or a table of any inputs, with ``labels``. As the model does, labels
            are shifted: a label is the target of the token before it. A ``target`` stays in its
            place. Without both the tokens are the labels, but for those of ``attention_mask`` 0.

    Raises:
        TypeError: If it is anything else.
        ValueError: If numbers of rows or dimensions do not fit.
    """
    if not isinstance(batch, Mapping) or len(batch) == 1:
        tokens, target = pair_of(batch)
        return {INPUT_IDS: tokens}, target
    named = {str(name): _tensor(value) for name, value in batch.items()}
    found = [name for name in named if name in _TARGETS]
    if INPUT_IDS not in named or len(found) > 1:
        raise TypeError(f"it has the names {[*named]}: expected input_ids, and labels or target")
    tokens = named[INPUT_IDS] = named[INPUT_IDS].long()
    if found:
        target = named.pop(found[0]).long()
    else:
        mask = named.get("attention_mask", torch.ones_like(tokens))
        target = tokens.where(mask != 0, IGNORED) if mask.shape == tokens.shape else tokens
    if tokens.dim() != 2 or target.shape != tokens.shape:
        raise ValueError(
            f"input_ids are {described(tokens)} and {(found or ['tokens'])[0]} "
            f"{described(target)}: expected (rows, length) of both"
        )
    if not found or found[0] == _LABELS:
        target = functional.pad(target[:, 1:], (0, 1), value=IGNORED)
    return named, target


def pair_of(batch: object) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of a batch, as a function may return it.

    Args:
        batch: Tokens ``(rows, length)``, whose targets are their successors; or a pair of inputs
            and targets; or a table of two, whose targets are called ``labels`` or ``target``.
            Values may be tensors, arrays or lists.

    Raises:
        TypeError: If it is anything else.
        ValueError: If numbers of rows or dimensions do not fit.
    """
    values = _values(batch)
    if len(values) == 1:
        tokens = _tensor(values[0])
        if tokens.is_floating_point() or tokens.dim() != 2 or tokens.shape[1] < 2:
            raise ValueError(
                f"it has one tensor, {described(tokens)}: expected tokens (rows, 2 or more), "
                f"whose targets are their successors, or inputs and targets"
            )
        return tokens[:, :-1].long().contiguous(), tokens[:, 1:].long().contiguous()
    inputs, target = map(_tensor, values)
    if not inputs.dim() or not target.dim() or len(inputs) != len(target):
        raise ValueError(
            f"inputs are {described(inputs)} and targets {described(target)}: expected as many "
            f"rows of both"
        )
    if inputs.dtype in _SMALL:
        inputs = inputs.long()
    return inputs, target.long() if target.dtype in (*_SMALL, torch.uint8) else target


def _values(batch: object) -> list[object]:
    """Returns the tokens of a batch, or its inputs and targets."""
    if isinstance(batch, Mapping):
        names = [str(name) for name in batch]
        targets = [name for name in batch if name in _TARGETS]
        if len(batch) == 1 or (len(batch) == 2 and len(targets) == 1):
            others = [name for name in batch if name not in targets]
            return [batch[name] for name in (*others, *targets)]
        raise TypeError(
            f"it has the names {names}: expected one, of tokens, or two, of which one is of "
            f"{list(_TARGETS)}: the first layer takes one tensor, so leave out the others"
        )
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        if batch and all(isinstance(value, torch.Tensor | np.ndarray) for value in batch):
            if len(batch) <= 2:
                return list(batch)
            raise TypeError(
                f"it has {len(batch)} tensors: expected tokens, or inputs and targets: the first "
                f"layer takes one tensor"
            )
        return [batch]
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [batch]
    raise TypeError(
        f"it is {'None' if batch is None else type(batch).__name__}: expected a tensor of tokens, "
        f"a pair of inputs and targets, or a table of these"
    )


def _tensor(value: object) -> Tensor:
    """Returns a tensor, array or list as a tensor."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        value = np.array(value)  # torch cannot share memory that is read-only or runs backwards
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        raise TypeError(
            f"a list of {len(value)} tensors in it: expected one tensor; a DataLoader makes such "
            f"lists of examples that are lists: make tensors of them first"
        )
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"a {kind} in it is no tensor: {error}: rows need one length") from error


def described(tensor: Tensor) -> str:
    """Returns dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

"""Warns of a stage whose chunks of time do not see each other, before its first forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Number
from typing import TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.model.wrappers import fsdp_modules
from pipegrad.pipeline.stage import Stage

_FEW = 32  # tokens that tell whether chunks see each other


def warn_of_blind(stage: Stage, values: Sequence[object], key: str) -> None:
    """Warns once of a stage whose chunks do not see each other, as a whole sequence does.

    A few tokens run in evaluation mode, at once and in two chunks, and outputs are compared. So a
    layer is found that looks at other positions and carries too little of them.

    Args:
        stage: Whose module takes inputs of one chunk, and carries something or nothing.
        values: The inputs of the first chunk of a sequence, time along dimension 1, and what it
            carries: None.
        key: As of `warn_once`.
    """
    lengths = {x.shape[1] for x in values if _has_time(x)}
    is_plain = all(isinstance(x, Tensor | Number | str | None) for x in values)
    few = min([_FEW, *lengths])
    # Another mode may be more than a flag: some adapters write into their weights.
    is_plain &= all(type(part).train is nn.Module.train for part in stage.module.modules())
    if len(lengths) != 1 or few < 2 or not is_plain or fsdp_modules({0: stage.module})[0]:
        return
    parameters = {id(p): p for p in stage.module.parameters()}
    devices = {p.device for p in parameters.values() if p.device.type != "cpu"}
    try:
        with torch.no_grad(), torch.random.fork_rng([*devices]):
            # A copy with the same parameters: a forward may write buffers, and keep what it likes.
            alike = copy.copy(stage)
            alike.__dict__.pop("binding", None)
            alike.module = copy.deepcopy(stage.module, parameters)
            for part in alike.module.modules():
                part.training = False
            whole, again = (_few(alike, values, [(0, few)]) for _ in range(2))
            cut = _few(alike, values, [(0, few // 2), (few // 2, few)])
    except Exception:  # noqa: BLE001 - the step itself says what is wrong
        return
    if cut.shape != whole.shape or not whole.is_floating_point() or not torch.equal(whole, again):
        return
    finfo = torch.finfo(whole.dtype)
    off = float((cut - whole).abs().max()) / max(float(whole.abs().max()), finfo.tiny)
    if off > finfo.eps**0.5:
        warn_once(
            f"stage {stage.index}: a sequence in two chunks of time gives other outputs than at "
            f"once, by {off:.1g} of the largest. What looks at other positions, or counts them, "
            f"must carry what it needs: Stage(carry=...)",
            key,
        )


def _few(stage: Stage, values: Sequence[object], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the outputs of a few tokens that go through a stage in parts."""
    number = len(values) - len(stage.carry)
    state, outputs = list(values[number:]), list[Tensor]()
    for begin, end in spans:
        part = [x[:, begin:end] if _has_time(x) else x for x in values[:number]]
        returned = stage.forward([*part, *state])
        state = list(returned[len(returned) - len(stage.carry) :]) if stage.carry else []
        outputs.append(returned[0])
    return torch.cat(outputs, 1)


def _has_time(value: object) -> TypeGuard[Tensor]:
    # Tokens, or a vector for each position: of two dimensions the second may be anything.
    return isinstance(value, Tensor) and value.dim() > 1 + value.is_floating_point()

"""Checks: what an audit is given, before the first step; the same error on all ranks."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterable, Sequence, Sized
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrad.audit.outputs import Batch
from pipegrad.audit.report import shown
from pipegrad.audit.truth import names_by_use
from pipegrad.errors import PlanError, in_words
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import FSDP1, wrapper_of
from pipegrad.pipeline.trees import flattened, is_cut

if TYPE_CHECKING:
    from pipegrad.audit.audit import Audit

_NAMES_SHOWN = 4


def checked(audit: Audit, steps: int | None, tolerance: float | None) -> list[Batch]:
    """Returns the batches of the steps.

    Raises:
        PlanError: If something cannot be audited.
    """
    if tolerance is not None and not tolerance > 0:
        raise PlanError(f"tolerance is {tolerance}, expected a number above 0")
    if audit.microbatches < 1:
        raise PlanError(f"microbatches is {audit.microbatches}, expected at least 1")
    if not 0 <= audit.replica < audit.num_replicas:
        raise PlanError(
            f"replica is {audit.replica} of {audit.num_replicas}, expected 0 to "
            f"{audit.num_replicas - 1}"
        )
    _check_models(audit)
    batches = _taken(audit.batches, steps)
    for batch in batches:
        _check_batch(batch, audit.microbatches, audit.num_replicas)
    return batches


def _check_models(audit: Audit) -> None:
    parameters = list(audit.model.parameters())
    if any(is_dtensor(p) or p.is_meta for p in parameters):
        raise PlanError(
            "the uncut model has DTensors or parameters without values: give a copy that was made "
            "before the stages were wrapped, with real values on every rank"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise PlanError("the uncut model has no parameter that requires a gradient")
    held = [parameter for module in audit.held for parameter in module.parameters()]
    if any(parameter.is_complex() for parameter in (*parameters, *held)):
        raise PlanError("a parameter is complex: an audit compares real ones")
    if any(parameter.is_meta for parameter in held):
        raise PlanError("a module of this rank has parameters without values, on the meta device")
    if any(wrapper_of(module) == FSDP1 for module in audit.held):
        raise PlanError("FSDP1 keeps parameters in flat ones: wrap stages in FSDP2 or DDP")


def _taken(batches: Iterable[Batch], steps: int | None) -> list[Batch]:
    """Returns as many batches as there are steps."""
    if steps is None and not isinstance(batches, Sized):
        raise PlanError("batches is an iterator, which may have no end: give steps, or a list")
    taken = list(itertools.islice(batches, steps))
    if not taken or (steps is not None and len(taken) < steps):
        raise PlanError(
            f"there are {len(taken)} batches, and {steps or 'no'} steps: give a batch for each step"
        )
    return taken


def _check_batch(batch: object, microbatches: int, num_replicas: int) -> None:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise PlanError(f"a batch is {type(batch).__name__}, expected (inputs, target)")
    rows = {
        f"{what}{path}": leaf.shape[0]
        for what, value in zip(("inputs", "target"), batch, strict=True)
        for path, leaf in flattened(value)[0]
        if is_cut(leaf)
    }
    if not rows:
        kinds = [type(value).__name__ for value in batch]
        raise PlanError(f"a batch has no tensors, but {' and '.join(kinds)}: give torch tensors")
    most = max(rows.values())
    if set(rows.values()) - {1, most} or most % (microbatches * num_replicas) or most == 0:
        raise PlanError(
            f"tensors of a batch have so many rows: {rows}; expected one number, a multiple of "
            f"{num_replicas} replicas x {microbatches} microbatches. What is not cut has one row"
        )


def copied(model: nn.Module) -> nn.Module:
    """Returns a copy of the uncut model, which the caller's steps cannot change."""
    try:
        found = copy.deepcopy(model)
        for module in found.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # the same values, and all of them
        return found
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PlanError(
            f"the uncut model cannot be copied: {in_words(error)}; give one without process groups "
            f"and other things of a job, for example the same layers in plain torch"
        ) from error


def digest_of(batches: Sequence[Batch]) -> str:
    """Returns a digest of all values of the batches."""
    found = hashlib.sha256()
    for batch in batches:
        for _, leaf in itertools.chain(*(flattened(value)[0] for value in batch)):
            found.update(_bytes(leaf))
    return found.hexdigest()


def _bytes(leaf: Any) -> bytes:  # noqa: ANN401 - of a tree
    if not isinstance(leaf, Tensor):
        # Other objects may print their address.
        return repr(leaf if isinstance(leaf, Number | str) else type(leaf)).encode()
    return (
        f"{leaf.dtype} {tuple(leaf.shape)}".encode()
        + leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def check_ranks(audit: Audit, every: Sequence[tuple[list[str], str, tuple[int, ...]]]) -> list[str]:
    """Checks what all ranks give; returns notes of what is odd in it.

    Args:
        audit: Of this rank.
        every: By rank, names of parameters, digest of batches, and (steps, microbatches, number of
            replicas, replica).

    Raises:
        PlanError: If sizes or batches differ, or a replica or a parameter has no rank.
    """
    sizes = {of_rank[:3] for _, _, of_rank in every}
    replicas = {of_rank[3] for _, _, of_rank in every}
    if len(sizes) > 1 or replicas != set(range(audit.num_replicas)):
        given = {rank: of_rank for rank, (_, _, of_rank) in enumerate(every)}
        raise PlanError(
            f"ranks give different audits; (steps, microbatches, num_replicas, replica) are "
            f"{given}: give all ranks the same sizes, and every replica a rank"
        )
    if len({digest for _, digest, _ in every}) > 1:
        raise PlanError(
            "ranks have different batches: an audit needs the batch of all replicas on every rank, "
            "so make it from one seed"
        )
    trained = [
        names
        for first, names in names_by_use(audit.model).items()
        if audit.model.get_parameter(first).requires_grad
    ]
    held: dict[str, set[int]] = {names[0]: set() for names in trained}
    for own, _, of_rank in every:
        for names in trained:
            if set(names) & set(own):
                held[names[0]].add(of_rank[3])
    _check_held([name for name, replicas in held.items() if not replicas])
    shared = [name for name, replicas in held.items() if len(replicas) < audit.num_replicas]
    note = (
        f"not every replica holds {shown(shared)}: these were taken for parameters that replicas "
        f"share, as experts are. If each replica has its own copy, give all modules of each rank"
    )
    return [note] if shared else []


def _check_held(missing: Sequence[str]) -> None:
    if missing:
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise PlanError(
            f"no rank holds {missing[:_NAMES_SHOWN]}{more} of the uncut model: give all modules of "
            f"each rank; if stages number their layers anew, give `names`, from names of the "
            f"modules to names of the uncut model"
        )

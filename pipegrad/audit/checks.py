"""Checks: the arguments of an audit, before the first step; all ranks raise the same error.

Then names: `match` finds the parameter of the uncut model for each parameter of a stage.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipegrad.audit.report import shown
from pipegrad.audit.truth import Batch, names_by_use
from pipegrad.errors import PlanError, in_words, refuse
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.ties import plain_name
from pipegrad.model.wrappers import FSDP1, wrapper_of
from pipegrad.pipeline.trees import flattened, is_cut

if TYPE_CHECKING:
    from pipegrad.audit.audit import Audit


def checked(audit: Audit, steps: int | None, tolerance: float | None) -> list[Batch]:
    """Returns the batches of the steps; a single batch is repeated.

    Raises:
        PlanError: If an argument is wrong, or a module cannot be audited.
    """
    refuse(
        PlanError,
        {
            f"tolerance is {tolerance}, expected a number above 0": (
                tolerance is not None and not tolerance > 0
            ),
            f"microbatches is {audit.microbatches}, expected at least 1": audit.microbatches < 1,
            f"replica is {audit.replica} of {audit.num_replicas}, expected 0 to "
            f"{audit.num_replicas - 1}": not 0 <= audit.replica < audit.num_replicas,
            "batches is an iterator, which may have no end: give steps, or a list": (
                steps is None and not isinstance(audit.batches, Sized)
            ),
        },
    )
    _check_models(audit)
    batches = list(itertools.islice(audit.batches, steps))
    if not batches or len(batches) < (steps or 1):
        raise PlanError(
            f"there are {len(batches)} batches, and {steps or 'no'} steps: give a batch for each "
            f"step"
        )
    for batch in batches:
        _check_batch(batch, audit.microbatches, audit.num_replicas)
    return batches * 2 if steps is None and len(batches) == 1 else batches


def _check_models(audit: Audit) -> None:
    parameters = list(audit.model.parameters())
    held = [parameter for module in audit.held for parameter in module.parameters()]
    reasons = {
        "the uncut model has DTensors or parameters without values: give a copy that was made "
        "before the stages were wrapped, with real values on every rank": any(
            is_dtensor(p) or p.is_meta for p in parameters
        ),
        "the uncut model has no parameter that requires a gradient": not any(
            p.requires_grad for p in parameters
        ),
        "a parameter is complex: an audit compares real ones": any(
            p.is_complex() for p in (*parameters, *held)
        ),
        "a module of this rank has parameters without values, on the meta device": any(
            p.is_meta for p in held
        ),
        "FSDP1 keeps parameters in flat ones: wrap stages in FSDP2 or DDP": any(
            wrapper_of(module) == FSDP1 for module in audit.held
        ),
    }
    refuse(PlanError, reasons)


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
    """Returns a copy of the uncut model, because the caller's steps may change the original."""
    try:
        result = copy.deepcopy(model)
        for module in result.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # gradients have the same values, and all of them
        return result
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PlanError(
            f"the uncut model cannot be copied: {in_words(error)}; give one without process groups "
            f"and other things of a job, for example the same layers in plain torch"
        ) from error


# Of a rank: names of its parameters, its batches as text, (steps, microbatches, number of replicas,
# replica), and names of its variants.
Reply = tuple[list[str], str, tuple[int, int, int, int], list[str]]


def check_ranks(audit: Audit, every: Sequence[Reply]) -> list[str]:
    """Checks the arguments of all ranks; returns notes about unusual ones.

    Raises:
        PlanError: If sizes, variants or batches differ, or a replica or a parameter has no rank.
    """
    held_names, batches, sizes, variants = zip(*every, strict=True)
    replicas = [of_rank[3] for of_rank in sizes]
    if len({of_rank[:3] for of_rank in sizes}) > 1 or {*replicas} != {*range(audit.num_replicas)}:
        raise PlanError(
            f"ranks give different audits; (steps, microbatches, num_replicas, replica) are "
            f"{dict(enumerate(sizes))}: give all ranks the same sizes, and every replica a rank"
        )
    if any(own != variants[0] for own in variants):
        raise PlanError(f"ranks have different variants: {variants}; give all ranks the same")
    if len({*batches}) > 1:
        raise PlanError(
            "ranks have different batches: an audit needs the batch of all replicas on every rank, "
            "so make it from one seed"
        )
    trained = [
        names
        for first, names in names_by_use(audit.model).items()
        if audit.model.get_parameter(first).requires_grad
    ]
    held = {
        names[0]: {r for own, r in zip(held_names, replicas, strict=True) if {*names} & {*own}}
        for names in trained
    }
    missing = [name for name, of_replicas in held.items() if not of_replicas]
    if missing:
        raise PlanError(
            f"no rank holds {shown(missing)} of the uncut model: give all modules of each rank; if "
            f"stages number their layers anew, give `names`, from names of the modules to names of "
            f"the uncut model"
        )
    shared = [name for name, of_replicas in held.items() if len(of_replicas) < audit.num_replicas]
    note = (
        f"not every replica holds {shown(shared)}: these were taken for parameters that replicas "
        f"share, as experts are. If each replica has its own copy, give all modules of each rank"
    )
    return [note] if shared else []


@dataclass(frozen=True)
class Names:
    """Tensors of a rank, by names of the uncut model.

    Attributes:
        parameters: Parameters; one with several names has an entry for each.
        buffers: Buffers that the uncut model has, too.
        uses: Name of a parameter -> all its names on this rank.
        of_modules: Names in the modules -> names in the uncut model.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    uses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    of_modules: dict[str, str] = field(default_factory=dict)


def match(
    modules: Sequence[nn.Module], model: nn.Module, known: Mapping[str, str] | None = None
) -> Names:
    """Returns the tensors of a rank, by names of the uncut model.

    Names without the segments of wrappers are used if shapes and values are equal. Otherwise a
    module is searched by shapes and values in the uncut model's list of parameters and buffers,
    because a slice of its layers is a run of that list. If no run fits, names and shapes suffice.

    Raises:
        PlanError: If no run has these shapes and values, or several have.
    """
    names = Names()
    for number, module in enumerate(modules):
        there = _names_there(module, model, f"module {number}", known)
        names.of_modules.update(there)
        for name, tensor in _entries(module):
            if name in there and isinstance(tensor, nn.Parameter):
                names.parameters[there[name]] = tensor
            elif name in there:
                names.buffers[there[name]] = tensor
    by_id = defaultdict[int, list[str]](list)
    for name, parameter in names.parameters.items():
        by_id[id(parameter)].append(name)
    names.uses.update({name: tuple(by_id[id(p)]) for name, p in names.parameters.items()})
    return names


def _names_there(
    module: nn.Module, model: nn.Module, what: str, known: Mapping[str, str] | None
) -> dict[str, str]:
    """Returns the names of a module's parameters and buffers -> their names in the uncut model."""
    own, whole = list(_entries(module)), list(_entries(model))
    trained = [(name, tensor) for name, tensor in own if isinstance(tensor, nn.Parameter)]
    shapes = {name: tensor.shape for name, tensor in whole}
    if known is not None:
        missing = [name for name, _ in trained if name not in known]
        wrong = [there for there in known.values() if there not in shapes]
        if missing:
            raise PlanError(f"{what}: `names` is wrong: it lacks {missing[:3]} of the module")
        if wrong:
            raise PlanError(
                f"{what}: `names` is wrong: the uncut model has no {wrong[:3]}, but "
                f"{list(shapes)[:3]} and so on"
            )
        for name, tensor in trained:
            if tensor.shape != shapes[known[name]]:
                raise PlanError(
                    f"{what}: {name} is {tuple(tensor.shape)}, and {known[name]} of the uncut "
                    f"model is {tuple(shapes[known[name]])}: an audit puts shards together if they "
                    f"are DTensors"
                )
        return {name: known[name] for name, _ in own if name in known}
    tensors = dict(whole)
    bare = {name: _bare(name) for name, _ in own}
    has_names = all(shapes.get(bare[name]) == tensor.shape for name, tensor in trained)
    if has_names and all(_equal(tensor, tensors[bare[name]]) for name, tensor in trained):
        return {name: there for name, there in bare.items() if there in shapes}
    # A slice of layers may count from 0 again. Then its names belong to other layers.
    runs = [whole[first : first + len(own)] for first in range(len(whole) - len(own) + 1)]
    fitting = [
        run
        for run in runs
        if all(
            a.shape == b.shape
            and isinstance(a, nn.Parameter) == isinstance(b, nn.Parameter)
            and (not isinstance(a, nn.Parameter) or _equal(a, b))
            for (_, a), (_, b) in zip(own, run, strict=True)
        )
    ]
    if len(fitting) == 1:
        return {name: there for (name, _), (there, _) in zip(own, fitting[0], strict=True)}
    if has_names and not fitting:
        return {name: there for name, there in bare.items() if there in shapes}
    raise PlanError(
        f"{what}: {len(fitting) or 'no'} runs of the uncut model's parameters have the shapes and "
        f"values of its parameters {[name for name, _ in trained[:3]]} and so on. Give `names`, "
        f"from names of the modules to names of the uncut model; or give both the same values, as "
        f"by load_state_dict, before they are audited"
    )


def _entries(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers in the order of modules, once for each of their names."""
    for home, part in module.named_modules(remove_duplicate=False):
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in tensors:
            yield f"{home}.{name}" if home else name, tensor


def _equal(a: Tensor, b: Tensor) -> bool:
    # Other ranks hold the other shards of a DTensor, and comparing them needs a collective.
    return is_dtensor(a) or torch.equal(a.detach().cpu(), b.detach().cpu().to(a.dtype))


def _bare(name: str) -> str:
    """Returns a name without the segments of wrappers; DDP adds `module`."""
    return ".".join(part for part in plain_name(name).split(".") if part != "module")

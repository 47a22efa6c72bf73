"""Matching: which parameter of the uncut model is this one of a stage?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipegrad.errors import PlanError
from pipegrad.model.dtensor import is_dtensor

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}  # DDP, torch.compile, and so on
_Entries = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Names:
    """What a rank holds, by names of the uncut model.

    Attributes:
        parameters: A parameter with several names has an entry for each.
        buffers: That the uncut model has, too.
        uses: Name of a parameter -> all its names on this rank.
        modules: Names of the uncut model's modules -> modules.
        of_modules: Names in the modules -> names in the uncut model.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    uses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    of_modules: dict[str, str] = field(default_factory=dict)


def match(
    modules: Sequence[nn.Module], model: nn.Module, known: Mapping[str, str] | None = None
) -> Names:
    """Returns what a rank holds, by names of the uncut model.

    Names are taken, without those of wrappers, if shapes and values are equal. Otherwise a module
    is looked for as a run of the uncut model's parameters and buffers, by shapes and values, as a
    slice of its layers is one. If there is none, names and shapes suffice.

    Args:
        modules: That the rank holds.
        model: The uncut model, with the values that the modules have.
        known: Names of the modules' parameters -> names in the uncut model.

    Raises:
        PlanError: If no run has these shapes and values, or several have.
    """
    names = Names()
    by_name = dict(model.named_modules(remove_duplicate=False))
    for number, module in enumerate(modules):
        there = _names_there(module, model, f"module {number}", known)
        names.of_modules.update(there)
        for name, tensor in _entries(module):
            if name in there and isinstance(tensor, nn.Parameter):
                names.parameters[there[name]] = tensor
            elif name in there:
                names.buffers[there[name]] = tensor
        parts = dict(module.named_modules(remove_duplicate=False))
        for name, home in _homes(parts, there).items():
            if home in by_name:
                names.modules[home] = parts[name]
    by_id: dict[int, list[str]] = {}
    for name, parameter in names.parameters.items():
        by_id.setdefault(id(parameter), []).append(name)
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
        wrong = [name for name, there in known.items() if there not in shapes]
        if missing or wrong:
            lacks = f"it lacks {missing[:3]} of the module; " if missing else ""
            unknown = [known[name] for name in wrong[:3]]
            has = f"the uncut model has no {unknown}, but " if wrong else "the uncut model has "
            raise PlanError(f"{what}: `names` is wrong: {lacks}{has}{list(shapes)[:3]} and so on")
        return {name: known[name] for name, _ in own if name in known}
    tensors = dict(whole)
    bare = {name: _bare(name) for name, _ in own}
    has_names = all(shapes.get(bare[name]) == tensor.shape for name, tensor in trained)
    if has_names and all(_equal(tensor, tensors[bare[name]]) for name, tensor in trained):
        return {name: there for name, there in bare.items() if there in shapes}
    # A slice of layers may begin again at 0. Then its names are those of other layers.
    runs = [whole[first : first + len(own)] for first in range(len(whole) - len(own) + 1)]
    fitting = [run for run in runs if _fits(own, run)]
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
    """Yields parameters and buffers in the order of modules, as often as they are used."""
    for home, part in module.named_modules(remove_duplicate=False):
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in tensors:
            yield f"{home}.{name}" if home else name, tensor


def _fits(own: _Entries, run: _Entries) -> bool:
    return all(
        a.shape == b.shape
        and isinstance(a, nn.Parameter) == isinstance(b, nn.Parameter)
        and (not isinstance(a, nn.Parameter) or _equal(a, b))
        for (_, a), (_, b) in zip(own, run, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    # The shards of a DTensor are with other ranks, and asking would be a collective.
    return is_dtensor(a) or torch.equal(a.detach().cpu(), b.detach().cpu().to(a.dtype))


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _homes(modules: Mapping[str, nn.Module], there: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of a stage's modules -> their names in the uncut model, as far as known."""
    homes = dict[str, str]()
    for name, module in modules.items():
        for inner, _ in _entries(module):
            full = f"{name}.{inner}" if name else inner
            if full in there and there[full].endswith(f".{inner}"):
                homes[name] = there[full].removesuffix(f".{inner}")
                break
    is_renumbered = any(_bare(name) != home for name, home in homes.items())
    for name in modules.keys() - homes.keys():
        if not is_renumbered:
            homes[name] = _bare(name)
        elif (home := _beside(name, homes)) is not None:
            homes[name] = home
    return homes


def _beside(name: str, homes: Mapping[str, str]) -> str | None:
    """Returns the name of a numbered module without tensors, by a numbered one beside it."""
    parent, _, own = name.rpartition(".")
    for other, home in homes.items():
        prefix, _, number = other.rpartition(".")
        there, _, moved = home.rpartition(".")
        if prefix == parent and own.isdigit() and number.isdigit() and moved.isdigit():
            index = str(int(own) + int(moved) - int(number))
            return f"{there}.{index}" if there else index
    return None

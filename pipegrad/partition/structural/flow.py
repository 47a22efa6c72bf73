"""Flow: which layers a model calls, in which order, and which values go from layer to layer.

[Note: flow] The model runs once, on a sample. Outside of layers, every operator of torch is seen,
and each of its results is recorded with the outputs of layers that it was computed from. So when a
layer is called, its inputs say which outputs of which earlier calls it needs, however far away
these are. The code between layers need not be understood: each stage runs it again.

The tensors of the sample, and the model's parameters and buffers, are fake. Fake tensors have a
shape, a dtype and a device, but no memory. So the run costs no memory, changes no buffer, draws no
random number, and works for a model on the meta device. If the model's code needs values of what it
is given, such as where a text has images, it runs on a copy of that. If it needs values of what
layers compute, it runs on its parameters and on copies of all other tensors. Then the random state
is put back. Attributes are those of a copy of the model, so no cache of the model keeps what the
run made.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from types import CellType, FunctionType

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import FakeTensorMode, quiet_fake_tensors, tree_flatten
from pipegrad.partition.structural.calls import Flow, Watch, find, roots_of
from pipegrad.partition.structural.model_recorder import ModelRecorder
from pipegrad.partition.structural.shallow import isolated
from pipegrad.partition.structural.stand_ins import EXPERTS


def flow_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    samples: Sequence[Mapping[str, object]],
) -> Flow:
    """Returns what a model does with a sample: the first one that it can take.

    Args:
        model: The uncut model. It is as before afterwards.
        layers: Its layers, by name.
        samples: Keyword arguments of its forward, in several ways.

    Raises:
        TopologyError: If the model fails.
    """
    is_meta = any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
    ways: list[Callable[..., Flow]] = [
        partial(_run, fake=True, given=given, dtype=dtype)
        for given in (False, True)
        for dtype in (None, EXPERTS)
    ]
    runs = [(way, sample) for sample in samples for way in ways]
    if not is_meta:
        runs += [(partial(_run, fake=False, given=True), sample) for sample in samples]
    failures = list[Exception]()
    for run, sample in runs:
        try:
            return _in_both_modes(run, model, layers, sample)
        except Exception as error:  # one of the last sample is raised below
            if sample is samples[-1]:
                if isinstance(error, TopologyError):
                    raise
                failures.append(error)
    failure = failures[-2 if is_meta else -1]  # of the run with most values, in its own dtypes
    raise TopologyError(
        f"{type(model).__name__} fails on a sample of {_shapes_of(samples[-1])}: "
        f"{in_words(failure)}. Give example={{...}}, the keyword arguments of its forward for a "
        f"small batch"
    ) from failure


def _in_both_modes(
    run: Callable[..., Flow],
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
) -> Flow:
    """Returns what a model does in its mode, with the random numbers that it draws in training.

    A model that was loaded is in eval mode, where no dropout draws, and is trained later.
    """
    flow = run(model, layers, sample)
    if model.training:
        return flow
    try:
        trained = run(model, layers, sample, is_training=True)
    except Exception:  # noqa: BLE001 - such as batch norm, which cannot be trained on one row
        return flow
    if [call.name for call in trained.calls] != [call.name for call in flow.calls]:
        return flow  # a step in training mode is refused, since it calls other layers
    if _handed(trained) != _handed(flow):
        return trained  # what layers hand on in training alone, such as balance losses
    calls = [
        replace(call, origin=replace(call.origin, draws=other.origin.draws))
        for call, other in zip(flow.calls, trained.calls, strict=True)
    ]
    return replace(flow, calls=tuple(calls))


def _handed(flow: Flow) -> list[object]:
    return [(call.changes, len(call.outputs), call.origin.sources) for call in flow.calls]


def _run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    fake: bool,
    given: bool,
    dtype: torch.dtype | None = None,
    is_training: bool = False,
) -> Flow:
    """Runs a model.

    Args:
        model: The model.
        layers: Its layers.
        sample: What it is given.
        fake: Whether its tensors have no values.
        given: Whether what it is given has values.
        dtype: Of fake tensors; their own if None.
        is_training: Whether to run in training mode.
    """
    tensor_of = cache(partial(_fake, dtype=dtype) if fake else _real)
    input_of = cache(partial(_real, dtype=dtype) if given else tensor_of)
    mode = FakeTensorMode(allow_non_fake_inputs=given) if fake else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if fake:
            stack.enter_context(quiet_fake_tensors())
        if given:
            stack.enter_context(torch.random.fork_rng())
        shared = _enclosed(model)
        untouched = stack.enter_context(_untouched(model, shared))
        with mode:
            copied = isolated(model, tensor_of, shared)
        if not given:  # else what has no fake among its inputs is computed
            stack.enter_context(mode)
        if is_training:
            copied.train()
        inputs = {n: input_of(x) if isinstance(x, Tensor) else x for n, x in sample.items()}
        recorder = ModelRecorder(copied, [*layers], inputs)
        try:
            with recorder, recorder.noticing_functions():
                returned = copied(**inputs)
        except Exception:
            untouched()  # what may be why
            raise
        recorder.refuse_new_buffers()
        untouched()
    _install_hooks(model, copied)
    return Flow(
        returned=recorder.seen(returned),
        calls=recorder.calls(),
        written=frozenset(recorder.written),
        writes_inputs=recorder.writes_inputs,
        is_heard=recorder.is_heard,
        sample=_shapes_of(sample),
    )


def _real(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor for a run on real ones, which may write into buffers and inputs."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.to(dtype if tensor.is_floating_point() else None, copy=True)


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a fake tensor like `tensor`, on the CPU if that has no memory.

    It has `dtype`, if there is one and the tensor is of floating point.
    """
    copied: Tensor = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
        device="cpu" if tensor.is_meta else tensor.device,
    )
    return (
        nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    )


def _shapes_of(sample: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in sample.items() if isinstance(x, Tensor)}


def _enclosed(model: nn.Module) -> list[object]:
    """Returns the containers that functions of a model hold, such as hooks, beside the model."""

    def content(cell: CellType) -> object:
        try:
            return cell.cell_contents
        except ValueError:  # nothing yet
            return None

    functions = (
        function
        for part in model.modules()
        for function in (*vars(part).values(), *part._forward_hooks.values())
        if isinstance(function, FunctionType)
    )
    contents = (content(cell) for function in functions for cell in function.__closure__ or ())
    return [x for x in contents if isinstance(x, list | dict | set | deque)]


def _install_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Gives a model the hooks that its first forward installs, and what says that they are there.

    Otherwise each stage would install them in layers that it shares with the model, and the model,
    or its next cut, once more.
    """
    pairs = [(model.get_submodule(name), part) for name, part in copied.named_modules()]
    if all(part._forward_hooks.keys() <= old._forward_hooks.keys() for old, part in pairs):
        return
    for old, part in pairs:
        for table in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            for key, hook in vars(part)[table].items():
                vars(old)[table].setdefault(key, hook)
        new = vars(part).keys() - vars(old).keys()
        vars(old).update({name: True for name in new if vars(part)[name] is True})


@contextlib.contextmanager
def _untouched(model: nn.Module, shared: Sequence[object]) -> Iterator[Callable[[], None]]:
    """Puts back what a function of the model, such as a hook, changes of the model itself.

    Yields:
        What refuses tensors there: a run of a stage, which is a copy, would not have them.
    """
    watch, known = Watch(model, (), {}), {id(x) for x in shared}

    def refuse() -> None:
        for change, values in watch.changes():
            box = find(roots_of(model, (), {}), change.path)
            if id(box) not in known and any(isinstance(x, Tensor) for x in tree_flatten(values)[0]):
                raise TopologyError(
                    f"a function that {type(model).__name__} holds, such as a hook, changes "
                    f"{change} by a reference to the model: each stage is a copy of it, and would "
                    f"not see that. Append to a list, or use what the layer returns"
                )

    try:
        yield refuse
    finally:
        watch.restore()

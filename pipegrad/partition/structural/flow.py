"""Flow: which layers a model calls, in which order, and which values go from layer to layer.

[Note: flow] The model runs once, on a sample. Outside of layers, every operator of torch is seen,
and for each of its results it is noted from which outputs of layers it was computed. So when a
layer is called, its inputs say which outputs of which earlier calls it needs, however far away
these are. The code between layers need not be understood: each stage runs it again.

The tensors of the sample, and the model's parameters and buffers, are fake. Fake tensors have a
shape, a dtype and a device, but no memory. So the run costs no memory, changes no buffer, draws no
random number, and works for a model on the meta device. If the model's code needs values of
tensors, it runs on the real ones, under a random state and with buffers that are put back. All
other attributes are those of a copy of the model, so no cache of the model keeps what the run made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import (
    FakeTensorMode,
    quiet_fake_tensors,
    tree_flatten,
)
from pipegrad.partition.structural.calls import Flow
from pipegrad.partition.structural.changes import Watch, enclosed, find, roots_of
from pipegrad.partition.structural.recorder import Recorder, recorded_layer, shapes_of
from pipegrad.partition.structural.shallow import isolated
from pipegrad.partition.structural.stand_ins import EXPERTS


def flow_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    timed: bool = False,
) -> Flow:
    """Returns what a model does with a sample.

    Args:
        model: The uncut model. It is as before afterwards.
        layers: Its layers, by name.
        sample: Keyword arguments of its forward.
        timed: Whether to measure how long layers take.

    Raises:
        TopologyError: If the model fails, or if layers without memory are to be measured.
    """
    is_meta = any(tensor.is_meta for tensor in _state(model).values())
    if timed and is_meta:
        raise TopologyError(
            "by='measured' runs the layers, and those of a model on the meta device cannot run: "
            "take by='time', or a number for each layer"
        )
    runs = [] if timed else [partial(_run, fake=True), partial(_run, fake=True, dtype=EXPERTS)]
    if not is_meta:
        runs.append(partial(_run, fake=False, timed=timed))
    failures = list[Exception]()
    for run in runs:
        try:
            return _in_both_modes(run, model, layers, sample)
        except TopologyError:
            raise
        except Exception as error:  # noqa: BLE001 - the first one is raised below
            failures.append(error)
    raise TopologyError(_failed(model, sample, failures[0])) from failures[0]


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
        replace(call, draws=other.draws)
        for call, other in zip(flow.calls, trained.calls, strict=True)
    ]
    return replace(flow, calls=tuple(calls))


def _handed(flow: Flow) -> list[object]:
    return [(call.changes, len(call.outputs), call.needs) for call in flow.calls]


def _failed(model: nn.Module, sample: Mapping[str, object], error: Exception) -> str:
    return (
        f"{type(model).__name__} fails on a sample of {shapes_of(sample)}: {in_words(error)}. Give "
        f"example={{...}}, the keyword arguments of its forward for a small batch"
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
    *,
    fake: bool,
    dtype: torch.dtype | None = None,
    timed: bool = False,
    is_training: bool = False,
) -> Flow:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if fake:
            stack.enter_context(quiet_fake_tensors())
            stack.enter_context(FakeTensorMode())
        else:
            stack.enter_context(_unchanged(model))
        made: dict[int, Tensor] = {}
        shared = enclosed(model)
        untouched = stack.enter_context(_untouched(model, shared))
        copied = isolated(
            model, (lambda x: _fake(x, made, dtype)) if fake else (lambda x: x), shared
        )
        if is_training:
            copied.train()
        inputs = {
            name: _fake(x, made, dtype) if fake and isinstance(x, Tensor) else x
            for name, x in sample.items()
        }
        recorder = Recorder(copied, timed=timed)
        for name in layers:
            recorded_layer(recorder, name, copied.get_submodule(name))
        before = dict(copied.named_buffers())
        recorder.given(inputs)
        try:
            with recorder:
                returned = copied(**inputs)
        except Exception:
            untouched()  # what may be why
            raise
        recorder.refuse_new_buffers(before, copied)
        untouched()
    _install_hooks(model, copied)
    seen, written = recorder.seen(returned), frozenset(recorder.written)
    return Flow(
        recorder.cleared(),
        seen,
        written,
        recorder.writes_inputs,
        recorder.is_heard,
        shapes_of(sample),
    )


def _fake(tensor: Tensor, made: dict[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns a fake tensor like `tensor`, on the CPU if that has no memory; the same one again.

    It has `dtype`, if that is given and the tensor is of floating point.
    """
    if id(tensor) not in made:
        copied: Tensor = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            device="cpu" if tensor.is_meta else tensor.device,
        )
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        made[id(tensor)] = copied
    return made[id(tensor)]


def _install_hooks(model: nn.Module, copied: nn.Module) -> None:
    """Gives a model the hooks that its first forward installs, and what says that they are there.

    Otherwise each stage would install them in layers that it shares with the model, and the model,
    or its next cut, once more.
    """
    parts = [(part, model.get_submodule(name)) for name, part in copied.named_modules()]
    if all(part._forward_hooks.keys() <= own._forward_hooks.keys() for part, own in parts):
        return
    for part, own in parts:
        for table in ("_forward_hooks", "_forward_hooks_with_kwargs"):
            for key, hook in vars(part)[table].items():
                vars(own)[table].setdefault(key, hook)
        new = vars(part).keys() - vars(own).keys()
        vars(own).update({name: True for name in new if vars(part)[name] is True})


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


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts buffers and random states back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)

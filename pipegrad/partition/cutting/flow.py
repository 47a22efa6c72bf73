"""Flow: records a model's calls of layers, in order, and the values that go from layer to layer.

[Note: flow] The model runs once, on a sample. Outside of layers, the recorder sees every operator
of torch, and records each result with the outputs of layers from which it was computed. The inputs
of a layer's call therefore show which outputs of earlier calls it needs, however early these calls
are. The code between layers is not analysed, because each stage runs it again.

The tensors of the sample, and the model's parameters and buffers, are fake. Fake tensors have a
shape, a dtype and a device, but no memory. The run therefore costs no memory, changes no buffer,
draws no random number, and works for a model on the meta device. If the model's code needs values
of its inputs, for example the positions of images in a text, it runs on a copy of the inputs. If it
needs values that layers compute, it runs on its parameters and on copies of all other tensors. Then
the random state is restored. The run uses a copy of the model, because a cache of the model must
not keep tensors of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain

import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError, in_words
from pipegrad.interop.private import FakeTensorMode, quiet_fake_tensors, tree_flatten
from pipegrad.partition.cutting.calls import Flow, Watch, find, roots_of
from pipegrad.partition.cutting.copies import enclosed, leaves_of, like, with_tensors
from pipegrad.partition.cutting.recorder import ModelRecorder
from pipegrad.partition.cutting.stand_ins import EXPERTS


def flow_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    samples: Sequence[Mapping[str, object]],
) -> Flow:
    """Returns the recorded run of a model on the first sample with which it does not fail.

    Raises:
        TopologyError: If the model fails with each sample.
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
            return _for_training(run, model, layers, sample)
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


def _for_training(
    run: Callable[..., Flow],
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sample: Mapping[str, object],
) -> Flow:
    """Returns the run of a model in training mode, or in its own mode if training mode fails.

    A loaded model is in eval mode, and is trained later. In training mode, dropout between layers
    draws random numbers, and layers may add losses. This mode may fail, because for example batch
    norm cannot be trained on one row.
    """
    if not model.training:
        with contextlib.suppress(Exception):
            return run(model, layers, sample, is_training=True)
    return run(model, layers, sample)


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
    """Runs a model."""
    tensor_of = cache(partial(_fake, dtype=dtype) if fake else _real)
    input_of = cache(partial(_real, dtype=dtype) if given else tensor_of)
    mode = FakeTensorMode(allow_non_fake_inputs=given) if fake else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if fake:
            stack.enter_context(quiet_fake_tensors())
        if given:
            stack.enter_context(torch.random.fork_rng())
        untouched = stack.enter_context(_untouched(model))
        with mode:
            copied = with_tensors(model, tensor_of)
        if not given:  # otherwise operators without a fake input compute real values
            stack.enter_context(mode)
        if is_training:
            copied.train()
        inputs = {n: input_of(x) if isinstance(x, Tensor) else x for n, x in sample.items()}
        recorder = ModelRecorder(copied, [*layers], inputs)
        try:
            with recorder, recorder.noticing_functions():
                returned = copied(**inputs)
        except Exception:
            untouched()  # raises first, because such a change may be the reason
            raise
        recorder.refuse_new_buffers()
        untouched()
    origins, nested = recorder.seen(returned)
    return Flow(
        returned=origins,
        nested=nested,
        calls=recorder.calls(),
        written=frozenset(recorder.written),
        writes_inputs=recorder.writes_inputs,
        is_heard=recorder.is_heard,
        sample=_shapes_of(sample),
    )


def _real(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a copy for a run on real tensors, which may write into it; a parameter as it is."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.to(dtype if tensor.is_floating_point() else None, copy=True)


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns a fake tensor like `tensor`, on the CPU if `tensor` is on the meta device.

    A floating-point tensor gets `dtype`, unless that is None.
    """
    copied: Tensor = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
        device="cpu" if tensor.is_meta else tensor.device,
    )
    return like(tensor, copied)


def _shapes_of(sample: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in sample.items() if isinstance(x, Tensor)}


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Undoes changes of the original model by its functions, such as hooks.

    Yields:
        A function that raises if the original model has got new tensors, because the stages, which
        are copies, would not have them.
    """
    watch, known = Watch(model, (), {}), {id(x) for x in enclosed(leaves_of(model))}

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

"""Stage: a part of the model, the names of its inputs and outputs, and the call of its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from pipegrad.errors import ScheduleError, StepError
from pipegrad.interop.private import script_arguments
from pipegrad.model.wrappers import unwrapped

if TYPE_CHECKING:
    from pipegrad.pipeline.scheduler import Scheduler

_Parameter = inspect.Parameter
_POSITIONAL = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
_REST = None  # goes to *args


Counts = Sequence[int] | Tensor  # for each sample, how many rows of a tensor it has
_Given = Mapping[str, object]  # the arguments of a step by name


@dataclass(frozen=True)
class BatchRules:
    """Rules of a model for the inputs of a step, which users then need not give.

    Attributes:
        accepts: Names that stages may take from a step although no stage names them, in the order
            of inputs without a name; None if any name is allowed.
        rows_of: Returns the number of rows of each sample, for inputs whose rows are no samples.
        samples_along: Returns the dimension of samples of each input where it is not the first;
            None if it has none.
        in_time: Returns the values to cut into chunks of time instead of a microbatch, and the
            dimension of time where it is not `time_dim` of the step. For example, a label that
            belongs to the token before it must not move to the next chunk.
    """

    accepts: Sequence[str] | None = None
    rows_of: Callable[[_Given], Mapping[str, Counts]] = lambda _: {}
    samples_along: Callable[[_Given], Mapping[str, int | None]] = lambda _: {}
    in_time: Callable[[_Given], tuple[_Given, Mapping[str, int | None]]] = lambda x: (x, {})


class Stage:
    """A module, and its index among the stages of the pipeline. Names make edges.

    An input is the output of that name of the nearest earlier stage that has one. If no stage has
    one, it is the argument of that name of `Scheduler.step`. Any output may feed any later stages.

    Args:
        module: Takes the inputs, returns the outputs. An input goes to the parameter of
            ``module.forward`` that has its name. If no input has such a parameter, all go by
            position. If only some have, the others take the parameters that are left, in order.
            The module may not change inputs in place.
        index: The index of the stage, from 0.
        inputs: Names of its inputs.
        outputs: Names of its outputs, which are tensors. The outputs of the last stage go to the
            loss, in order. If the module returns a mapping, a dataclass or a named tuple that has
            these names, the outputs are read from it, and the rest is dropped. If it returns a
            tensor, tuple or list, the first values are the outputs, in order. No other tensor may
            follow them, but None and numbers may.
        recompute: Keep only the inputs of a forward, and run it again right before its backward.
            For the last stage the loss runs again too. This is one more forward a microbatch,
            whether the schedule splits backwards or not. Torch's random numbers and the buffers of
            the module are the same in both forwards. Whatever else a forward depends on must not
            change.
        losses: Names of losses that the stage makes itself, such as the balance loss of experts.
            The module returns them after its outputs, or by name: tensors of one element. They are
            added to the loss as one of loss_fn is: divided by the number of microbatches, or by
            ``loss_divisor``. If a batch may have microbatches of different rows, give it to the
            ranks of these stages, too, because such a loss counts by rows. With
            ``loss_reduction="token_mean"`` the module must return sums over its tokens, because
            they are divided by the sum of all weights. Several stages may have a loss of one name.
            A stage with losses need not have outputs, unless it is the last one.
        carry: Names of values that the stage passes from one chunk of time to the next, on its
            rank, with the gradient flowing back: see ``chunks`` of `Scheduler.step`. They are the
            last parameters of ``module.forward``, which are None in the first chunk of a sequence,
            and the last values that it returns, or are found by name as outputs are. Each is a
            tree: dicts, lists and tuples of tensors. Other objects in it are passed unchanged. A
            tensor that has a gradient may not be changed in place later.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        inputs: Sequence[str] = ("x",),
        outputs: Sequence[str] = ("x",),
        *,
        recompute: bool = False,
        losses: Sequence[str] = (),
        carry: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.recompute = recompute
        self.index = index
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.losses = tuple(losses)
        self.carry = tuple(carry)
        self._returns_one = len(self.outputs) == 1 and not (losses or carry)

    @property
    def rules(self) -> BatchRules:
        """The model's rules for the inputs of a step."""
        return BatchRules()

    @cached_property
    def layers(self) -> Mapping[str, float]:
        """Its layers by name, with the relative time of each; empty if it is no chain."""
        is_chain = isinstance(self.module, nn.Sequential)
        parts = self.module.named_children() if is_chain else ()
        return {name: 1.0 for name, layer in parts if next(layer.parameters(), None) is not None}

    @cached_property
    def binding(self) -> Binding:
        """The call of its module with its inputs.

        Raises:
            ScheduleError: If the names of inputs do not fit those that forward has.
        """
        return bind(self.module, (*self.inputs, *self.carry), f"stage {self.index}")

    def forward(self, values: Sequence[object]) -> tuple[Any, ...]:
        """Returns the outputs, in the order of their names, then losses, then carried values.

        Args:
            values: The inputs, in the order of their names, and the carried values.

        Raises:
            StepError: If the module returns other values.
        """
        out = self.binding(*values)
        if type(out) is Tensor and self._returns_one:
            return (out,)
        return self._outputs_of(out)

    def _outputs_of(self, out: object) -> tuple[Any, ...]:
        tensors = (*self.outputs, *self.losses)
        names = (*tensors, *self.carry)
        named = fields_of(out)
        if named is not None and (not isinstance(out, tuple) or {*names} <= {*named}):
            kinds: object = {name: type(value).__name__ for name, value in named.items()}
            returned, others = [named[name] for name in names if name in named], []
        else:
            values = list(out) if isinstance(out, tuple | list) else [out]
            kinds = [type(value).__name__ for value in values]
            returned, others = values[: len(names)], values[len(names) :]
        # A tensor without a name is refused in a tuple, because then the names before it may not
        # belong to the tensors before it.
        is_unclear = any(isinstance(value, Tensor) for value in others)
        are_tensors = all(isinstance(value, Tensor) for value in returned[: len(tensors)])
        if len(returned) < len(names) or not are_tensors or is_unclear:
            losses = f" and its losses {list(self.losses)}" if self.losses else ""
            behind = f", and behind them what it carries, {list(self.carry)}" if self.carry else ""
            raise StepError(
                f"stage {self.index} returned {kinds}, expected a tensor for each of its outputs "
                f"{list(self.outputs)}{losses}{behind}"
            )
        return tuple(returned)


class StageSource(Protocol):
    """A source of stages for a `Scheduler`, instead of a list: a model that makes any of them."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""

    @property
    def tied(self) -> Sequence[Sequence[str]]:
        """The argument ``tied`` of `Scheduler`."""

    @property
    def loss_fn(self) -> Callable[..., object] | None:
        """The model's own loss, which is a sum and its weight; None if it has none."""

    @property
    def labels(self) -> Sequence[str]:
        """Names of the inputs that the model's own loss needs."""

    def stages(self, indices: Sequence[int], *, own_loss: bool) -> list[Stage]:
        """Returns some stages; with its own loss the last one also returns that."""

    def begins(self, stages: Sequence[int]) -> Mapping[int, str]:
        """Returns digests of the values of stages, if this rank has their first values."""

    def load(self, stages: Sequence[int], scheduler: Scheduler) -> None:
        """Gives this rank's stages their values, unless they have values; all ranks call it."""


def fields_of(value: object) -> Mapping[Any, object] | None:
    """Returns the fields of a mapping, a dataclass or a named tuple, by name; None for others."""
    if isinstance(value, Mapping):  # also transformers' ModelOutput and BatchEncoding
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: Mapping[str, object] = value._asdict()
        return named
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    return None


@dataclass(frozen=True)
class Binding:
    """A function, and its call with values that have names.

    Attributes:
        function: The function to call.
        positions: Indices of the values that are passed by position, in this order.
        keywords: Indices and names of the values that are passed by keyword.
    """

    function: Callable[..., Any]
    positions: tuple[int, ...]
    keywords: tuple[tuple[int, str], ...]

    @cached_property
    def is_in_order(self) -> bool:
        """True if all go by position, as they come."""
        return not self.keywords and self.positions == tuple(range(len(self.positions)))

    def __call__(self, *values: object) -> Any:  # noqa: ANN401 - whatever the function returns
        """Calls the function with these values, which are in the order of names."""
        if self.is_in_order:
            return self.function(*values)
        return self.function(
            *[values[i] for i in self.positions], **{name: values[i] for i, name in self.keywords}
        )


def bind(function: Callable[..., Any], names: Sequence[str], what: str) -> Binding:
    """Returns the call of `function` with values of these names.

    A value goes to the parameter of its name. If no parameter has any of the names, all values go
    by position. If some have, the other values take the parameters that are left, in order, and
    then ``*args`` or ``**kwargs``. Values are passed by position where that is possible, because
    a plain forward hook of torch sees positional arguments only.

    Args:
        function: A function or a module. Of a module the forward inside of torch's wrappers counts.
        names: The names of the values, in their order.
        what: The owner of the values, for messages.

    Raises:
        ScheduleError: If only some values have parameters of their names, and these stand in
            another order than the values do.
    """
    by_position = tuple(range(len(names)))
    parameters = parameters_of(function)
    if parameters is None or len(set(names)) < len(names):
        return Binding(function, by_position, ())
    targets = _targets(parameters, names)
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    at = [positional.index(name) for name in targets if name in positional]
    # Some names match and some do not: then a value without a match might be passed to a parameter
    # that was meant for another one. It is safe only if the matches are in order.
    is_mixed = 0 < len(set(names) & {p.name for p in parameters}) < len(names)
    if is_mixed and any(a > b for a, b in pairwise(at)):
        raise ScheduleError(
            f"{what} gives {list(names)} in this order, and the parameters are "
            f"{[str(p).split(':')[0] for p in parameters]}: some names are the same, but the order "
            f"is not, so values would be swapped. Use the names of the parameters for all, or the "
            f"same order"
        )
    # Parameters are filled by position up to the first one without a value.
    filled = takewhile(lambda name: name in targets, positional)
    leading = [targets.index(name) for name in filled]
    rest = [i for i, name in enumerate(targets) if name is _REST]
    keywords = [
        (i, name) for i, name in enumerate(targets) if name is not None and i not in leading
    ]
    return Binding(function, (*leading, *rest), tuple(keywords))


def _targets(parameters: Sequence[_Parameter], names: Sequence[str]) -> list[str | None]:
    """Returns for each value the name of the parameter that it goes to, or `_REST`."""
    known = {p.name for p in parameters if p.kind in (*_POSITIONAL, _Parameter.KEYWORD_ONLY)}
    takes_names = any(p.kind is _Parameter.VAR_KEYWORD for p in parameters)
    takes_rest = any(p.kind is _Parameter.VAR_POSITIONAL for p in parameters)
    some_known = not known.isdisjoint(names)
    free = iter(
        p.name
        for p in parameters
        if p.kind in _POSITIONAL
        and p.name not in names
        # An option is not for a value that **kwargs can take by its name.
        and (p.default is _Parameter.empty or not (some_known and takes_names))
    )
    goes_by_name = takes_names and (some_known or not takes_rest)
    targets = list[str | None]()
    for name in names:
        left_over = name if goes_by_name else _REST
        targets.append(name if name in known else next(free, left_over))
    return targets


def parameters_of(function: Callable[..., Any]) -> list[_Parameter] | None:
    """Returns the parameters of a function; None if it has no signature."""
    if isinstance(function, nn.Module):
        function = inner_module(function).forward
    names = script_arguments(function)
    if names is not None:
        return [_Parameter(name, _Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def inner_module(module: nn.Module) -> nn.Module:
    """Returns the module whose forward a wrapper of torch calls: compiled, checkpointed or DDP."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        inner = inner or getattr(module, "_checkpoint_wrapped_module", None) or unwrapped(module)
        if not isinstance(inner, nn.Module) or inner is module:
            return module
        module = inner

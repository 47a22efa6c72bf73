"""Stage: a piece of the model, and the names of what it takes and makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from pipegrad.errors import ScheduleError, StepError
from pipegrad.pipeline.binding import Binding, bind
from pipegrad.schedules.program.program import Link


class Stage:
    """A module and its place in the pipeline. Names make edges.

    An input is what the nearest earlier stage with an output of that name makes; if none does, what
    `Scheduler.step` is given under that name. So any output may feed any later stages.

    Args:
        module: Takes the inputs, returns the outputs: a tensor, or a tuple, list or mapping of
            tensors. An input goes to the parameter of ``module.forward`` that has its name. If
            there is none for any of them, all go by position. If there are some, the others take
            the parameters that are left, in order. It may not change them in place.
        index: Which stage it is, from 0.
        inputs: Names of what it takes.
        outputs: Names of what it makes; those of the last stage go to the loss, in order.
        recompute: Keep nothing of a forward but the inputs, and run it again right before its
            backward (and the loss, behind the last stage): one more forward a microbatch, split
            backward or not. Torch's random numbers are the same again, and buffers as they were;
            what else a forward depends on must not change.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        inputs: Sequence[str] = ("x",),
        outputs: Sequence[str] = ("x",),
        *,
        recompute: bool = False,
    ) -> None:
        self.module = module
        self.recompute = recompute
        self.index = index
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @cached_property
    def binding(self) -> Binding:
        """How its module is called.

        Raises:
            ScheduleError: If the names of inputs do not fit those that forward has.
        """
        return bind(self.module, self.inputs, f"stage {self.index}")

    def forward(self, values: Sequence[object]) -> tuple[torch.Tensor, ...]:
        """Returns the outputs, in the order of their names.

        Args:
            values: The inputs, in the order of theirs.

        Raises:
            StepError: If the module returns something else.
        """
        out = self.binding(*values)
        if type(out) is torch.Tensor and len(self.outputs) == 1:
            return (out,)
        return self._outputs_of(out)

    def _outputs_of(self, out: object) -> tuple[torch.Tensor, ...]:
        found: tuple[object, ...]
        if isinstance(out, Mapping):
            found = tuple(out.get(name) for name in self.outputs)
        else:
            found = tuple(out) if isinstance(out, tuple | list) else (out,)
        tensors = tuple(value for value in found if isinstance(value, torch.Tensor))
        if len(tensors) != len(found) or len(found) != len(self.outputs):
            kinds = [type(value).__name__ for value in found]
            raise StepError(
                f"stage {self.index} returned {kinds}, expected a tensor for each of its outputs "
                f"{list(self.outputs)}"
            )
        return tensors


@dataclass(frozen=True)
class Wiring:
    """How the stages of a pipeline hang together.

    Attributes:
        links: Values that stages hand on.
        external: Names that `Scheduler.step` must be given, in the order of first use.
        taken: For each stage its inputs, in order: a number in `links`, or an external name.
        made: For each stage its outputs, in order: a number in `links`; of the last none.
    """

    links: tuple[Link, ...]
    external: tuple[str, ...]
    taken: tuple[tuple[int | str, ...], ...]
    made: tuple[tuple[int, ...], ...]


def wire(ends: Mapping[int, tuple[Sequence[str], Sequence[str]]]) -> Wiring:
    """Returns how stages hang together.

    Args:
        ends: Stage -> names of its inputs and of its outputs; all stages from 0.

    Raises:
        ScheduleError: If a name is doubled or reserved, or a stage that is not the last makes
            something that nobody takes.
    """
    num_stages = len(ends)
    consumers: dict[tuple[int, str], list[int]] = {}
    sources: list[list[tuple[int, str] | str]] = []
    newest: dict[str, int] = {}
    for stage in range(num_stages):
        inputs, outputs = ends[stage]
        for names, what in ((inputs, "inputs"), (outputs, "outputs")):
            if len(set(names)) != len(names) or not names:
                raise ScheduleError(
                    f"stage {stage} has the {what} {list(names)}: expected one or more, each once"
                )
        sources.append([(newest[n], n) if n in newest else n for n in inputs])
        for source in sources[-1]:
            if not isinstance(source, str):
                consumers.setdefault(source, []).append(stage)
        newest |= dict.fromkeys(outputs, stage)
    for stage in range(num_stages - 1):
        wasted = [n for n in ends[stage][1] if (stage, n) not in consumers]
        if wasted:
            raise ScheduleError(
                f"stage {stage} makes {wasted}, which no later stage takes: name them among the "
                f"inputs of one, or leave them out"
            )
    external = tuple(dict.fromkeys(s for found in sources for s in found if isinstance(s, str)))
    reserved = [name for name in external if name in ("target", "loss_divisor")]
    if reserved:
        raise ScheduleError(
            f"stages take {reserved} from outside, which are arguments of step() itself: rename"
        )
    order = sorted(consumers, key=lambda made: (made[0], list(ends[made[0]][1]).index(made[1])))
    number = {made: i for i, made in enumerate(order)}
    return Wiring(
        tuple(Link(name, stage, tuple(consumers[stage, name])) for stage, name in order),
        external,
        tuple(tuple(s if isinstance(s, str) else number[s] for s in found) for found in sources),
        tuple(
            tuple(number[stage, name] for name in ends[stage][1] if (stage, name) in number)
            for stage in range(num_stages)
        ),
    )

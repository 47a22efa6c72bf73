"""Meetings: replicas that train alone average their parameters every few steps.

Step 10 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.comm.failures import FailedSteps
from pipegrad.comm.process_groups import Groups
from pipegrad.comm.watch.watch import Bounded
from pipegrad.gradients.reducer import Reducer
from pipegrad.model.dtensor import local
from pipegrad.plan.meetings import Meeting
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import OuterStep


class Meetings:
    """Makes the outer step of all parameters of this rank, every few steps.

    Args:
        plan: Of this rank.
        outer: What happens in a meeting; None if no parameter of any rank meets.
        groups: The communicators; those of comm stream 0 are used.
        reducer: It is waited for before a meeting.
        failures: Of all steps.
        main_parameters: Returns what this rank steps, by key.
        within_seconds: How long a meeting may take.

    Attributes:
        is_apart: Whether replicas have stepped since they were equal. The same on all ranks.
        number: Meetings so far. The same on all ranks.
        met_bytes: Bytes that this rank has averaged so far.
    """

    def __init__(
        self,
        plan: Plan,
        outer: OuterStep | None,
        *,
        groups: Groups,
        reducer: Reducer,
        failures: FailedSteps,
        main_parameters: Callable[[], Mapping[str, nn.Parameter]],
        within_seconds: float,
    ) -> None:
        self._plan = plan
        self._outer = outer
        self._groups = groups
        self._reducer = reducer
        self._failures = failures
        self._main_parameters = main_parameters
        self._within_seconds = within_seconds
        self.is_apart = False
        self.number = 0
        self.met_bytes = 0
        self._num_steps = 0  # since the last meeting
        # Of what this rank averages: the parameters of the last meeting, and the momentum, flat, by
        # index.
        self._anchors: dict[int, Tensor] = {}
        self._momenta: dict[int, Tensor] = {}

    @property
    def every(self) -> int:
        """Steps between two meetings; 1 if nothing meets."""
        return 1 if self._outer is None else self._outer.every

    def begin(self) -> None:
        """Begins anew with parameters that are equal on all replicas, without momentum.

        Sync: on the current stream.
        """
        self._num_steps, self.is_apart = 0, False
        self._momenta.clear()
        self._take_anchors()

    def count_step(self) -> None:
        """Counts a step that has given gradients, whether or not an optimizer uses them."""
        # Not the steps of optimizers: one replica alone might leave one out. All ranks end a step
        # with gradients, or all fail in it. So all ranks meet after the same step.
        self._num_steps += self._outer is not None

    def meet_if_due(self) -> None:
        """Meets the other replicas after every so many steps, and notes that they are apart before.

        Sync: on the current stream, after all comm streams. The host waits if collectives block it.

        Raises:
            ReduceError: If a collective failed. The failure is final.
        """
        if self._outer is None or not self._num_steps:
            return
        self.is_apart = self._num_steps < self._outer.every
        if self.is_apart:
            return
        self._num_steps = 0
        self.number += 1
        with self._meeting():
            # A parameter sync of the step before may still use the same communicators.
            self._reducer.wait()
            began, main_parameters = self._reducer.tape.now(), self._main_parameters()
            for meeting in self._plan.meetings:
                tensors = [local(main_parameters[key]).data for key in meeting.keys]
                self._meet(meeting, tensors, self._outer)
            self._reducer.tape.note("wait for ranks", "the meeting of replicas", began)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs to go on from here; empty if nothing meets.

        Between two meetings it has what this rank steps: replicas are different then. It has the
        parameters of the last meeting if the present parameters do not give them.
        """
        if self._outer is None:
            return {}
        state: dict[str, Any] = {
            "outer": asdict(self._outer),
            "num_steps": self._num_steps,
            "number": self.number,
            "is_apart": self.is_apart,
            "momenta": _saved(self._momenta),
            "anchors": _saved(self._saved_anchors(self.is_apart)),
        }
        if self.is_apart:
            state["stepped"] = _saved(dict(self._stepped()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a result of `state_dict` of this rank; begins anew if it is empty.

        Args:
            state: Replicas have equal parameters. If they were apart when it was saved, each
                replica gets its own again.

        Raises:
            ValueError: If it is not such a state, or was saved with another outer step.
        """
        self.begin()
        # If another rank refuses its state, this rank begins anew too, and must count as the others
        # do: by this number ranks decide whether to compare copies.
        self.number = 0
        if self._outer is None or not state:
            return
        # With another `every` the run would not end with a meeting, because its steps before count.
        if state["outer"] != asdict(self._outer):
            raise ValueError(
                f"it was saved with the outer step {_written(state['outer'])}, and this run has "
                f"{_written(asdict(self._outer))}: choose the same numbers"
            )
        own = {index: values.numel() for index, values in self._stepped()}
        averaged = {index: values.numel() for index, values in self._anchors.items()}
        anchors, stepped = state["anchors"], state.get("stepped", {})
        is_apart = bool(state["is_apart"])
        kept = {index: averaged[index] for index in self._saved_anchors(is_apart)}
        _check("the momentum", state["momenta"], averaged, needs_all=False)
        _check("the last meeting", anchors, kept)
        _check("the parameters", stepped, own if is_apart else {})
        main_parameters = self._main_parameters()
        for meeting in self._plan.meetings:
            tensors = [local(main_parameters[key]).data for key in meeting.keys]
            if meeting.index in stepped:
                _write(tensors, stepped[meeting.index])
            for saved, held in ((state["momenta"], self._momenta), (anchors, self._anchors)):
                if meeting.index in saved:
                    held[meeting.index] = saved[meeting.index].to(tensors[0].device, copy=True)
        self._num_steps, self.number = int(state["num_steps"]), int(state["number"])
        self.is_apart = is_apart

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Bounds a meeting in time; a failure inside is final for this rank, and posted."""
        # Some parameters may have met and others not. Nobody can go on from there.
        ranks = sorted({rank for meeting in self._plan.meetings for rank in meeting.step.ranks})
        with Bounded("the meeting of replicas", ranks, within_seconds=self._within_seconds):
            try:
                with self._reducer.reporting("the meeting of replicas", ranks):
                    yield
            except BaseException as error:
                self._failures.post(error, begins=False, final=True)
                raise

    def _meet(self, meeting: Meeting, tensors: Sequence[Tensor], outer: OuterStep) -> None:
        """Averages some parameters over replicas, makes the outer step, and takes the result."""
        if not meeting.numel:
            return
        if meeting.averages:
            anchor = self._anchors[meeting.index]
            # The way that each replica went is sent, not where it is: it is smaller, so the sum
            # loses fewer of its bits.
            gradient = anchor - _flat(tensors, meeting.dtype)
            dist.all_reduce(gradient, group=self._groups.of(meeting.step.ranks, 0))
            gradient.div_(len(meeting.step.ranks))
            self._step(meeting.index, gradient, outer)
            _write(tensors, anchor)
            self.met_bytes += meeting.nbytes
        for step in meeting.spread:
            values = _flat(tensors, tensors[0].dtype)
            # Bytes can be sent on every backend. Some backends lack other dtypes.
            group = self._groups.of(step.ranks, 0)
            dist.broadcast(values.view(torch.uint8), src=step.owner, group=group)
            _write(tensors, values)

    def _step(self, index: int, gradient: Tensor, outer: OuterStep) -> None:
        """Moves an anchor as `torch.optim.SGD` with ``nesterov=True`` does."""
        if outer.momentum:
            if index not in self._momenta:
                self._momenta[index] = torch.zeros_like(gradient)
            momentum = self._momenta[index]
            momentum.mul_(outer.momentum).add_(gradient)
            gradient.add_(momentum, alpha=outer.momentum)
        self._anchors[index].add_(gradient, alpha=-outer.lr)

    def _take_anchors(self) -> None:
        dtypes = {meeting.index: meeting.dtype for meeting in self._plan.meetings}
        averages = {meeting.index for meeting in self._plan.meetings if meeting.averages}
        self._anchors = {
            index: values.to(dtypes[index])
            for index, values in self._stepped()
            if index in averages
        }

    def _saved_anchors(self, is_apart: bool) -> dict[int, Tensor]:
        """Returns the anchors that cannot be made of the parameters that replicas have now."""
        # Right after a meeting an anchor is equal to the parameters. If it has more bits than they
        # have, it would lose them.
        main_parameters = self._main_parameters()
        wider = {
            meeting.index
            for meeting in self._plan.meetings
            if any(main_parameters[key].dtype != meeting.dtype for key in meeting.keys)
        }
        return {i: anchor for i, anchor in self._anchors.items() if is_apart or i in wider}

    def _stepped(self) -> Iterator[tuple[int, Tensor]]:
        """Yields copies of what this rank steps: index of a meeting, and elements, flat."""
        main_parameters = self._main_parameters() if self._plan.meetings else {}
        for meeting in self._plan.meetings:
            tensors = [local(main_parameters[key]).data for key in meeting.keys]
            yield meeting.index, _flat(tensors, tensors[0].dtype)


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a new flat tensor with the elements of some tensors, each in the order of indices."""
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def _write(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies a result of `_flat` back."""
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _saved(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Returns copies on the CPU."""
    return {index: tensor.detach().to("cpu", copy=True) for index, tensor in tensors.items()}


def _written(outer: Mapping[str, Any]) -> str:
    """Returns an outer step as text, such as "every=2, lr=0.7"."""
    return ", ".join(f"{name}={value}" for name, value in outer.items())


def _check(
    what: str, saved: Mapping[int, Tensor], own: Mapping[int, int], *, needs_all: bool = True
) -> None:
    """Refuses saved values that are not those of this rank's meetings."""
    found = {index: values.numel() for index, values in saved.items()}
    if found != own and (needs_all or found):
        raise ValueError(f"{what} has elements {found} by meeting, expected {dict(own)}")

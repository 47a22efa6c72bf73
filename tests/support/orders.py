"""Orders as frameworks write them: of torch's schedules, and those whose hangs were reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

Cells = list[list[str]]
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
MULTI = {  # -> stages of a rank
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def multi(name: str, num_ranks: int, num_microbatches: int, **options: object) -> Any:
    """Returns a schedule of torch with several stages a rank, as it is before it runs."""
    num_stages = num_ranks * MULTI[name]
    stage = SimpleNamespace(
        num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=nn.Identity()
    )
    cls = getattr(torch_schedules, name)
    return cls([stage] * MULTI[name], num_microbatches, **options)


class _RecordedStage:
    """A stage that writes down what torch's schedule does with it."""

    has_backward, submod = True, nn.Identity()

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.cells: list[str] = []
        self.stage_index = self.group_rank = rank
        self.num_stages = self.group_size = num_ranks
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1

    def _transfer(self, name: str, microbatch: int, *, is_none: bool) -> list[str]:
        return [] if is_none else [f"{self.stage_index}{name}{microbatch}"]

    def get_fwd_recv_ops(self, microbatch: int) -> list[str]:
        return self._transfer("RECV_F", microbatch, is_none=self.is_first)

    def get_fwd_send_ops(self, microbatch: int) -> list[str]:
        return self._transfer("SEND_F", microbatch, is_none=self.is_last)

    def get_bwd_recv_ops(self, microbatch: int) -> list[str]:
        return self._transfer("RECV_B", microbatch, is_none=self.is_last)

    def get_bwd_send_ops(self, microbatch: int) -> list[str]:
        return self._transfer("SEND_B", microbatch, is_none=self.is_first)

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.cells.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.cells.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _factor: int) -> None:
        self.cells.append(f"{self.stage_index}REDUCE_GRAD")


def single(name: str, num_ranks: int, num_microbatches: int) -> Cells:
    """Returns what torch's code of a schedule with one stage a rank does, in its order."""
    result = Cells()
    for rank in range(num_ranks):
        stage = _RecordedStage(rank, num_ranks)
        schedule = getattr(torch_schedules, name)(stage, num_microbatches)
        schedule._initialize_stage = lambda *_: None

        def start(ops: Iterable[str], cells: list[str] = stage.cells, **_: object) -> list[object]:
            cells.extend(ops)
            return []

        def start_sorted(ops: Iterable[str], start: Any = start, **_: object) -> dict[int, object]:
            start(ops)
            return {}

        batch = mock.patch.object(torch_schedules, "_batch_p2p", start)
        with batch, mock.patch.object(torch_schedules, "_sorted_batch_p2p", start_sorted):
            schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        result.append(stage.cells)
    return result


def just_in_time(computes: Sequence[str]) -> Cells:
    """Returns computes with each receive right before its compute, each send right behind.

    One text for each rank; stages lie in loops over the ranks.
    """
    num_ranks = len(computes)
    last = max(
        int(cell.partition("F")[0]) for row in computes for cell in row.split() if "F" in cell
    )
    result = Cells()
    for row in computes:
        cells = list[str]()
        for cell in row.split():
            kind = "F" if "F" in cell else "B"
            stage, _, microbatch = cell.partition(kind)
            ends = (0, last) if kind == "F" else (last, 0)
            crosses = num_ranks > 1
            cells += [f"{stage}RECV_{kind}{microbatch}"] * (crosses and int(stage) != ends[0])
            cells.append(cell)
            cells += [f"{stage}SEND_{kind}{microbatch}"] * (crosses and int(stage) != ends[1])
        result.append(cells)
    return result


def megatron(num_ranks: int, num_microbatches: int) -> Cells:
    """Returns what Megatron's schedule without interleaving calls, on each rank."""
    result = Cells()
    for rank in range(num_ranks):
        warm = min(num_ranks - rank - 1, num_microbatches)
        steady = num_microbatches - warm
        cells = ["recv_forward", "forward_step", "send_forward"] * warm
        cells += ["recv_forward"] * (steady > 0)
        for number in range(steady):
            cells += ["forward_step", "send_forward_recv_backward", "backward_step"]
            is_end = number == steady - 1
            cells.append("send_backward" if is_end else "send_backward_recv_forward")
        cells += ["recv_backward", "backward_step", "send_backward"] * warm
        result.append(cells)
    return result


class PipeInstruction:
    """Prints as DeepSpeed's instructions do."""

    def __init__(self, name: str, buffer: int | None = None) -> None:
        self._text = f"{name}({'' if buffer is None else f'buffer_id={buffer}'})"

    def __repr__(self) -> str:
        return self._text


def deepspeed(num_ranks: int, num_microbatches: int) -> list[list[list[PipeInstruction]]]:
    """Returns for each rank the lists of instructions of a step by DeepSpeed's 1F1B.

    Gradients leave before activations arrive, and activations leave behind gradients that arrive.
    """
    result = []
    for rank in range(num_ranks):
        buffers = max(2, min(num_ranks - rank, num_microbatches))
        turns: list[tuple[str, int]] = []
        warm = min(num_ranks - rank, num_microbatches)
        turns += [("F", m) for m in range(warm)]
        for m in range(num_microbatches):
            turns.append(("B", m))
            turns += [("F", m + warm)] * (m + warm < num_microbatches)
        steps: list[list[PipeInstruction]] = []
        sends: list[PipeInstruction] = []
        for kind, m in turns:
            own = m % buffers
            receives, following = list[PipeInstruction](), list[PipeInstruction]()
            if kind == "F":
                receives += [PipeInstruction("RecvActivation", own)] * (rank > 0)
                receives += [PipeInstruction("LoadMicroBatch", own)] * (rank == 0)
                following += [PipeInstruction("SendActivation", own)] * (rank < num_ranks - 1)
            else:
                receives += [PipeInstruction("RecvGrad", own)] * (rank < num_ranks - 1)
                following += [PipeInstruction("SendGrad", own)] * (rank > 0)
            compute = PipeInstruction("ForwardPass" if kind == "F" else "BackwardPass", own)
            exchange = [*sends, *receives] if kind == "F" else [*receives, *sends]
            steps.append([*exchange, compute])
            sends = following
        end = [PipeInstruction(n) for n in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")]
        steps.append([*sends, *end])
        result.append(steps)
    return result

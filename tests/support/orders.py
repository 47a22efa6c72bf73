"""Orders as frameworks write them: of torch's schedules, and those whose hangs were reported."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

Cells = list[list[str]]
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


def _call(name: str, **arguments: object) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


def megatron_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, *, overlap: bool = False
) -> Cells:
    """Returns what Megatron's schedule with interleaving calls, on each rank.

    These are the calls of megatron-core 0.16.1, as recorded in six sizes, each with overlap or not.

    Source: ``forward_backward_pipelining_with_interleaving`` in
    megatron/core/pipeline_parallel/schedules.py.
    """
    chunks = [  # of the forwards of a rank; backwards have them in reverse
        chunk
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for _ in range(first, min(first + num_ranks, num_microbatches))
    ]
    ranks = [_Interleaved(rank, num_ranks, chunks, num_chunks) for rank in range(num_ranks)]
    return [rank.calls(overlap=overlap) for rank in ranks]


class _Interleaved:
    """Writes down what Megatron's schedule with interleaving calls on one rank."""

    def __init__(self, rank: int, num_ranks: int, chunks: Sequence[int], num_chunks: int) -> None:
        self._is_first, self._is_last = rank == 0, rank == num_ranks - 1
        self._behind, self._chunks, self._last_chunk = num_ranks - 1, chunks, num_chunks - 1
        self._warm = min((num_ranks - rank - 1) * 2 + self._last_chunk * num_ranks, len(chunks))
        self._cells: list[str] = []

    def _comes(self, k: int, *, is_end: bool) -> bool:
        """Whether something arrives behind the k-th forward, or the k-th backward."""
        if k == len(self._chunks) - 1:
            return False
        meanwhile = k - self._behind  # what the other end of the loop computes
        return not is_end or (meanwhile >= 0 and self._chunks[meanwhile] != self._last_chunk)

    def _forward(self, k: int) -> dict[str, object]:
        """Writes a forward; returns the arguments of the exchange behind it."""
        chunk = self._chunks[k]
        self._cells.append(_call("forward_step", vp_stage=chunk))
        is_unsent = self._is_last and chunk == self._last_chunk
        sent: dict[str, object] = {"output_tensor": None} if is_unsent else {}
        return {**sent, "recv_prev": self._comes(k, is_end=self._is_first)}

    def _backward(self, k: int) -> dict[str, object]:
        """Writes a backward; returns the arguments of the exchange behind it."""
        chunk = self._last_chunk - self._chunks[k]
        self._cells.append(_call("backward_step", vp_stage=chunk))
        is_unsent = self._is_first and chunk == 0
        sent: dict[str, object] = {"input_tensor_grad": None} if is_unsent else {}
        return {**sent, "recv_next": self._comes(k, is_end=self._is_last)}

    def calls(self, *, overlap: bool) -> list[str]:
        cells, warm, total = self._cells, self._warm, len(self._chunks)
        of_forward, of_backward = "send_forward_recv_forward", "send_backward_recv_backward"
        of_both = "send_forward_backward_recv_forward_backward"
        cells.append("recv_forward")
        gradient: dict[str, object] = {"input_tensor_grad": None, "recv_next": not self._is_last}
        asynchronous = {"overlap_p2p_comm": True}
        for k in range(warm):
            forward = self._forward(k)
            is_end = k == warm - 1 and warm < total  # where the first gradient is received, too
            if is_end and not overlap:
                cells.append(_call(of_both, **forward, **gradient))
            else:
                cells.append(_call(of_forward, **forward))
        if warm < total and overlap:
            cells.append(_call(of_backward, **gradient, **asynchronous))
        for k in range(total - warm):
            forward = self._forward(k + warm)
            if overlap:
                cells.append(_call(of_forward, **forward, **asynchronous))
                cells.append(_call(of_backward, **self._backward(k), **asynchronous))
            else:
                cells.append(_call(of_both, **forward, **self._backward(k)))
        cells += ["recv_backward"] * (warm == total)
        for k in range(total - warm, total):
            cells.append(_call(of_backward, **self._backward(k)))
        return cells


class PipeInstruction:
    """Prints as DeepSpeed's instructions do."""

    def __init__(self, name: str, buffer: int | None = None) -> None:
        self._text = f"{name}({'' if buffer is None else f'buffer_id={buffer}'})"

    def __repr__(self) -> str:
        return self._text


# Two ranks and three microbatches, as DeepSpeed prints them; a dot ends a step. Gradients leave
# before activations arrive, and activations leave after gradients that arrive.
_FIRST_RANK = (
    "LoadMicroBatch0 ForwardPass0 . SendActivation0 LoadMicroBatch1 ForwardPass1 . "
    "RecvGrad0 SendActivation1 BackwardPass0 . LoadMicroBatch0 ForwardPass0 . "
    "RecvGrad1 SendActivation0 BackwardPass1 . RecvGrad0 BackwardPass0 . "
)
_LAST_RANK = (
    "RecvActivation0 ForwardPass0 . BackwardPass0 . SendGrad0 RecvActivation1 ForwardPass1 . "
    "BackwardPass1 . SendGrad1 RecvActivation0 ForwardPass0 . BackwardPass0 . SendGrad0 "
)


def deepspeed() -> list[list[list[PipeInstruction]]]:
    """Returns for each rank the lists of instructions of a step by DeepSpeed's 1F1B."""
    end = [PipeInstruction(n) for n in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")]
    result = [
        [
            [PipeInstruction(word[:-1], int(word[-1])) for word in step.split()]
            for step in text.split(".")
        ]
        for text in (_FIRST_RANK, _LAST_RANK)
    ]
    for steps in result:
        steps[-1] += end
    return result

"""profile_stages: the costs of stages in one process, without ranks; for planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipegrad.errors import ScheduleError
from pipegrad.observe.stage_profile import StageAlone
from pipegrad.pipeline.losses import loss_parts
from pipegrad.pipeline.stage import Stage
from pipegrad.simulation.costs import StageCosts


def profile_stages(
    stages: Sequence[Stage],
    microbatch: Mapping[str, object],
    *,
    target: object = None,
    loss_fn: Callable[..., object] | None = None,
    splits: bool = False,
    is_weighted: bool = False,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> tuple[StageCosts, ...]:
    """Returns what one microbatch costs on each stage, measured one after the other.

    The stages are not changed. They need no process group, and only one of them computes at a time.
    What the optimizer takes is not measured. `measure_costs` does the same on the ranks of a job.

    Args:
        stages: All stages, in order, on `device`.
        microbatch: The external inputs, by name.
        target: What `loss_fn` gets.
        loss_fn: Takes the last stage's outputs and the target. Without it, the outputs of the last
            stage are the roots of its backward.
        splits: Whether backwards are split into I and W.
        is_weighted: Whether `loss_fn` returns sums with weights, as for "token_mean".
        device: Where to compute.
        repeats: Of each pass; the median counts.

    Raises:
        ScheduleError: If stages are missing, or an input of one is.
        Exception: What a stage raises.
    """
    if [stage.index for stage in stages] != list(range(len(stages))) or not stages:
        raise ScheduleError(
            f"stages {[stage.index for stage in stages]}: expected all of a model, in order"
        )
    values, costs = dict(microbatch), list[StageCosts]()
    made = dict[str, Tensor]()

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        assert loss_fn is not None
        return loss_parts(loss_fn(*outputs, target), is_weighted=is_weighted)[0]

    for stage in stages:
        missing = [name for name in stage.inputs if name not in values]
        if missing:
            raise ScheduleError(
                f"stage {stage.index} takes {missing}, which no stage before it makes: the "
                f"microbatch has {list(microbatch)}"
            )
        is_last = stage.index == len(stages) - 1
        alone = StageAlone(
            stage,
            [values[name] for name in stage.inputs],
            [made[name] for name in stage.inputs if name in made],
            target=target,
            loss=loss if is_last and loss_fn is not None else None,
            splits=splits,
            device=torch.device(device),
        )
        outputs = dict(zip(stage.outputs, alone.outputs(), strict=True))
        costs.append(alone.costs({} if is_last else outputs, repeats))
        made |= {n: t.detach().requires_grad_(t.requires_grad) for n, t in outputs.items()}
        values |= made
    return tuple(costs)

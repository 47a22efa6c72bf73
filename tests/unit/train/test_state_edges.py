"""State of the optimizer in a checkpoint: master copies, and pieces of a whole tensor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from pipegrad import ParameterRecord, Topology
from pipegrad.errors import ConfigError
from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.named_optimizer import NamedState
from pipegrad.train.checkpoint.shards import Shard
from pipegrad.train.checkpoint.storage import Contents
from pipegrad.train.checkpoint.training_state import TrainingState
from pipegrad.train.config import Config
from pipegrad.train.schema import Model

PIECES = ("[ep=0]", "[ep=1]")


def state_of(
    parameter: nn.Parameter, main: nn.Parameter, shard: Shard | None = None
) -> tuple[TrainingState, torch.optim.Optimizer]:
    """Returns the state of a rank with one parameter, "experts", and its optimizer."""
    shape = tuple(parameter.shape)
    record = ParameterRecord("0.experts", "experts", 0, shape, parameter.dtype, True, (0,), 0)
    mains = [MainParameter(record, main)]
    name = "experts[ep=0]" if shard else "experts"
    optimizer = torch.optim.Adam([main], lr=0.1)
    NamedState(
        optimizer,
        {name: mains[0]},
        [["experts"]],
        strides={"0.experts": parameter.stride()},
        joined={name: name},
    )
    sync = SimpleNamespace(
        topology=Topology.build(axes=(("pp", 1), ("dp", 1), ("ep", 2 if shard else 1))).at(0),
        plan=SimpleNamespace(routes=(), divisors=(), independent_axes=()),
        records=lambda: [record],
        parameter=lambda _: parameter,
        main_parameters=lambda: mains,
        wait_parameters=lambda: None,
    )
    scheduler: Any = SimpleNamespace(sync=sync, state_dict=dict)
    packed: Any = SimpleNamespace(key="random.0", packed=lambda: torch.zeros(1))
    state = TrainingState(
        scheduler,
        {},
        optimizer,
        common=packed,
        random_states=packed,
        shards={"0.experts": shard} if shard else {},
    )
    return state, optimizer


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_checkpoint_has_master_copies_and_no_second_copy_of_other_parameters(
    *, is_copied: bool
) -> None:
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    main = nn.Parameter(torch.full((2, 3), 1.001)) if is_copied else parameter
    written = state_of(parameter, main)[0].state_dict(4)
    stored = {key: value for key, value in written.items() if key.startswith("stored.")}
    assert list(stored) == (["stored.experts"] if is_copied else [])
    for value in stored.values():
        assert torch.equal(value.local, main.detach().reshape(-1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_pieces_that_made_different_numbers_of_steps_the_whole_made_the_most(
    order: tuple[int, int],
) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    state, optimizer = state_of(parameter, parameter, Shard((4, 2), (2, 2), 0, 0, PIECES))
    steps, rows = (3.0, 7.0), (torch.tensor([5.0, 1.0]), torch.tensor([2.0, 4.0]))
    read = {f"optimizer.experts.step{PIECES[i]}": torch.tensor(steps[i]) for i in order}
    read |= {f"optimizer.experts.rows{PIECES[i]}": rows[i] for i in order}
    state._restore(optimizer, read)
    assert optimizer.state[parameter]["step"].item() == 7.0
    # What has elements is of one piece, and not mixed of several.
    assert torch.equal(optimizer.state[parameter]["rows"], rows[order[-1]])


def saved(*size: int) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), [])


@pytest.mark.parametrize(
    ("rows", "is_refused"),
    [
        (dict.fromkeys(PIECES, (2,)), False),
        ({"": (4,)}, True),  # of a run without pieces: whose elements are these?
        ({PIECES[0]: (2,)}, True),
        ({"": (4, 2)}, False),
        ({"": ()}, False),
    ],
)
def test_state_that_is_not_per_element_is_read_by_the_pieces_that_wrote_it_alone(
    rows: dict[str, tuple[int, ...]], *, is_refused: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    state, _ = state_of(parameter, parameter, Shard((4, 2), (2, 2), 0, 0, PIECES))
    config = Config(model=Model(factory="a:b"))
    config._path = Path("job.toml")
    there: dict[str, Any] = {"model.experts": saved(4, 2)}
    there |= {f"optimizer.experts.rows{at}": saved(*size) for at, size in rows.items()}

    def check() -> None:
        state.check(config, Contents({}, Metadata(there), {}), [{"rows"}], {"model.experts"})

    if not is_refused:
        check()
        return
    with pytest.raises(ConfigError, match="is not kept for each element of the whole tensor"):
        check()

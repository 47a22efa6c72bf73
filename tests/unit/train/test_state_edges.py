"""State in a checkpoint: master copies, pieces of a whole tensor, and what is packed."""

from __future__ import annotations

import io
import zipfile
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
from pipegrad.train.checkpoint.storage import Contents, DamageError
from pipegrad.train.checkpoint.training_state import COMMON, TrainingState, pack, unpack
from pipegrad.train.config import Config
from pipegrad.train.optimizer import Update
from pipegrad.train.schema import Model

PIECES = ("[ep=0]", "[ep=1]")
FIRST = Shard((4, 2), (((0, 0), (2, 2)),), PIECES)


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
    update = Update(Config(model=Model(factory="a:b")), scheduler.sync, optimizer, None)
    state = TrainingState(
        scheduler,
        {},
        optimizer,
        update=update,
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
    state, optimizer = state_of(parameter, parameter, FIRST)
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
    state, _ = state_of(parameter, parameter, FIRST)
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


def test_packed_state_comes_back() -> None:
    found = unpack(pack({"a": torch.arange(2**12), "b": [1, "text"]}))
    assert torch.equal(found["a"], torch.arange(2**12))
    assert found["b"] == [1, "text"]


def deflated() -> torch.Tensor:
    packed, out = pack({"a": torch.zeros(2**20)}), io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packed.numpy().tobytes())) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    small = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
    assert small.numel() < packed.numel() / 100
    return small


def test_what_is_packed_wrong_is_damage_and_is_not_inflated() -> None:
    """Security, F6. 262 KB became 256 MiB."""
    state, _ = state_of(parameter := nn.Parameter(torch.zeros(2)), parameter)
    for packed, says in (
        (deflated(), "cannot be read: .*are compressed"),
        (torch.zeros(9, dtype=torch.uint8), "cannot be read: "),
        (pack({"update": {}}), "is of another version: KeyError"),
    ):
        state._read = {COMMON: packed}
        with pytest.raises(DamageError, match=f"its 'common' {says}"):
            state.restore(4)

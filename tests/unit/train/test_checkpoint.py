"""What a checkpoint has: pieces of whole tensors, places along the mesh, what all ranks share."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim.lr_scheduler import LRScheduler

from pipegrad import ParameterRecord, Topology
from pipegrad.errors import ConfigError
from pipegrad.gradients.main_params import Locations, MainParameter
from pipegrad.gradients.named_optimizer import use_names
from pipegrad.gradients.sync import GradientSync
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad.train.checkpoint.shards import Shard, boxes_of, fitted
from pipegrad.train.checkpoint.storage import Contents, DamageError
from pipegrad.train.checkpoint.training_state import COMMON, TrainingState, check_keys, pack, unpack
from pipegrad.train.config import Config
from pipegrad.train.optimizer import Update, make_learning_rate
from pipegrad.train.schema import Model, Optimizer, Parallel
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.expert_parallel import ExpertParallel
from pipegrad_handlers.sequence_parallel import SequenceParallel
from tests.support.gradients.plans import Handlers, manifest

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_boxes_have_the_elements_of_a_flat_range_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    whole = numbered(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    boxes = list(boxes_of(begin, end, shape))
    elements = [value for box in boxes for value in whole[window(*box)].reshape(-1).tolist()]
    assert elements == list(range(begin, end))
    assert len(boxes) <= 2 * len(shape) - 1


@given(SHAPES, st.data())
def test_pieces_of_any_sizes_make_the_whole_tensor(shape: list[int], data: st.DataObject) -> None:
    """Each piece is written in two flat parts, as two ranks of a sharded optimizer do."""
    whole = numbered(shape)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.integers(1, 12))  # of more than nine, too
    pieces = whole.tensor_split(count, dim)
    shards = fitted_at(dim, {f"[tp={i}]": tuple(p.shape) for i, p in enumerate(pieces)})
    found = torch.full(shape, -1)
    for piece, shard in zip(pieces, shards, strict=True):
        assert shard.shape == tuple(shape)
        flat = piece.reshape(-1)
        middle = data.draw(st.integers(0, flat.numel()))
        for begin, end in ((0, middle), (middle, flat.numel())):
            chunk = shard.chunk(flat[begin:end], begin)
            first = 0
            for offsets, sizes in chunk.boxes:
                part = chunk.local[first : first + torch.Size(sizes).numel()].view(sizes)
                assert (found[window(offsets, sizes)] == -1).all()
                found[window(offsets, sizes)] = part
                first += part.numel()
            assert first == chunk.local.numel()
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("pieces", "dim", "said"),
    [
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 4)}, 0, "pieces of 'up.weight' do not fit along dim"),
        ({"[tp=0]": (2,), "[tp=1]": (2, 4)}, 0, "do not fit along dimension 0"),
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 3)}, 2, "has no dimension 2: its shape is (2, 3)"),
        ({"[tp=0]": (2, 3), "[tp=1]": (2, 3)}, -3, "has no dimension -3"),
        ({"[tp=0]": (), "[tp=1]": ()}, 0, "has no dimension 0: its shape is ()"),
        ({"[ep=0,tp=0]": (2,), "[ep=0,tp=1]": (2,)}, 0, "several dimensions of the mesh"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    pieces: dict[str, tuple[int, ...]], dim: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.shards = ") as caught:
        fitted_at(dim, pieces)
    assert said in str(caught.value)


def fitted_at(dim: int, pieces: dict[str, tuple[int, ...]]) -> list[Shard]:
    config = Config(model=Model(factory="a:b"), parallel=Parallel(shards={"up.*": dim}))
    config._path = Path("job.toml")
    return list(fitted(config, "0.up.weight", pieces).values())


def numbered(shape: list[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def window(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


MODEL = manifest(["whole", "cut", "experts", "experts.whole"])
WHOLE = ("sequence-parallel", SequenceParallel(parameters=["*whole"]))


def places(
    axes: tuple[tuple[str, int], ...], rank: int, handlers: Handlers, data: tuple[str, ...]
) -> list[str]:
    """Returns the place of each parameter, and of buffers."""
    view = Topology.build(axes=axes, rank=rank, data=data)
    plan = make_plans(MODEL, view, handlers, GradientOptions(bucket_bytes=0), ranks=[rank])[rank]
    found = Locations(view, plan)
    return [found.of(record.key) for record in MODEL.records(view)] + [found.of()]


def test_a_place_names_the_dimensions_along_which_copies_differ() -> None:
    axes = (("pp", 1), ("dp", 2), ("ep", 2), ("tp", 2))
    handlers = [("expert-parallel", ExpertParallel()), WHOLE]
    for rank, (ep, tp) in {1: (0, 1), 6: (1, 0)}.items():
        assert places(axes, rank, handlers, ("dp", "ep")) == [
            "", f"[tp={tp}]", f"[ep={ep},tp={tp}]", f"[ep={ep}]", f"[ep={ep},tp={tp}]"
        ]  # fmt: skip
    ones = tuple((name, 1) for name, _ in axes)
    assert places(ones, 0, handlers, ("dp", "ep")) == [""] * 5
    # Replicas have no place, though nobody reduces them, but experts have.
    two = (("pp", 1), ("dp", 2))
    assert places(two, 1, [], ("dp",)) == [""] * 5
    assert places(two, 1, [("data-parallel", DataParallel())], ("dp",)) == [""] * 5
    along = [("expert-parallel", ExpertParallel(axis="dp"))]
    assert places(two, 1, along, ("dp",)) == ["", "", "[dp=1]", "[dp=1]", "[dp=1]"]


def test_other_locations_are_refused_and_keys_of_the_optimizer_are_not_its_business() -> None:
    config = Config(model=Model(factory="a:b"))
    config._path = Path("job.toml")
    model = {"model.a[tp=0]", "model.a[tp=1]", "model.b"}
    there = {*model, "optimizer.a[tp=0].step", "step"}
    check_keys(config, there, model)
    everywhere, apart = "(everywhere the same)", "[tp=0] [tp=1]"
    for here, says in {
        "model.a": f"'a' is there in the locations {apart}, and here in {everywhere}: choose the",
        "model.a[tp=0]": f"'a' is there in the locations {apart}, and here in [tp=0]: choose the",
        "model.b[ep=1]": f"'b' is there in the locations {everywhere}, and here in [ep=1]: choose",
        "model.new[tp=0]": "the model has 'new[tp=0]', which the checkpoint does not hold: choose",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_keys(config, there, {here})
        assert says in str(caught.value)


SCHEDULES: dict[str, list[dict[str, Any]]] = {
    "StepLR": [{"name": "StepLR", "step_size": 2}],
    "MultiStepLR": [{"name": "MultiStepLR", "milestones": [2, 5]}],
    "OneCycleLR": [{"name": "OneCycleLR", "max_lr": 0.5, "total_steps": 20}],
    "CyclicLR": [{"name": "CyclicLR", "base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3}],
    "restarts": [{"name": "CosineAnnealingWarmRestarts", "T_0": 3}],
    "a row": [
        {"name": "LinearLR", "start_factor": 0.1, "total_iters": 4, "steps": 4},
        {"name": "CosineAnnealingLR", "T_max": 9},
    ],
}


class Run:
    """The parts of a run that have a state which all ranks share."""

    def __init__(self, schedule: list[dict[str, Any]], lr: float = 0.1) -> None:
        optimizer = Optimizer.model_validate(
            {"name": "SGD", "lr": lr, "momentum": 0.5, "schedule": schedule}
        )
        config = Config(model=Model(factory="a:b"), optimizer=optimizer)
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.5)
        self.schedule = cast("LRScheduler", make_learning_rate(config, self.optimizer))
        self.update = Update(config, cast("GradientSync", None), self.optimizer, self.schedule)

    def options(self, number: int) -> list[tuple[float, float]]:
        """Returns learning rate and momentum of some steps."""
        found = []
        for _ in range(number):
            group = self.optimizer.param_groups[0]
            found.append((group["lr"], group["momentum"]))
            self.optimizer.step()
            self.schedule.step()
        return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Run(SCHEDULES[name]).options(12)
    first = Run(SCHEDULES[name])
    assert first.options(5) == whole[:5]
    second, state = Run(SCHEDULES[name]), unpack(pack(first.update.state_dict()))
    monkeypatch.setattr("pipegrad.train.optimizer.advance", None)  # no step is made again
    second.update.restore(state, 5)
    assert second.options(7) == whole[5:]


def test_another_schedule_makes_the_steps_that_were_not_skipped() -> None:
    first = Run(SCHEDULES["StepLR"])
    first.options(3)
    first.update.skipped = 2
    other = Run(SCHEDULES["restarts"], lr=0.2)
    whole = Run(SCHEDULES["restarts"], lr=0.2).options(6)
    other.update.restore(first.update.state_dict(), 5)
    assert other.update.skipped == 2
    assert other.options(3) == whole[3:]
    # As without an entry.
    run = Run(SCHEDULES["StepLR"])
    run.update.restore(None, 4)
    assert run.options(2) == Run(SCHEDULES["StepLR"]).options(6)[4:]


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
    use_names(
        optimizer,
        {name: mains[0]},
        [["experts"]],
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

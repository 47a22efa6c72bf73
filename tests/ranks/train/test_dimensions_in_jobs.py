"""Jobs with further mesh dimensions: sizes, what factories are given, checkpoints, refusals."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipegrad.errors import ConfigError, PlanError
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.uncut import load as load_whole
from pipegrad.train.config import Config, load
from pipegrad.train.corpus import mixed
from pipegrad.train.job import Job
from pipegrad.train.rendering import rendered_summary
from pipegrad.train.summary import make_summary
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import (
    EXAMPLES,
    Trained,
    command,
    refusal,
    trained,
    trained_to,
    trainer_of,
)

TENSOR, EXPERTS = "tensor_parallel.toml", "mixture_of_experts.toml"
ALONE = {TENSOR: "parallel.dimensions.tp=1", EXPERTS: "parallel.dimensions.ep=1"}
OWNED = "{name='pipeline-shared', placement='owner'}"
ROWS = f"gradient_handlers=[{OWNED}, {{name='expert-parallel', placement='shard'}}]"
SEQUENCE = "{name='sequence-parallel', parameters=['embedding.*', '*norm*', '*.bias']}"
TOKENS = 4 * 16 * 64  # of all four batches
STEPS = ["train.steps=4", "optimizer.lr=1e-2", "optimizer.schedule={name='StepLR', step_size=2}"]

RUNS: dict[str, tuple[str, list[str]]] = {
    "pp 2 x tp 2": (TENSOR, []),
    "dp 2 x tp 2, in rows": (
        TENSOR,
        ["parallel.data=2", f"gradient_handlers=['sharded', {SEQUENCE}]"],
    ),
    "pp 2 x ep 2": (EXPERTS, []),
    "pp 2 x ep 2, in rows": (EXPERTS, [ROWS, "parallel.schedule=zb-h1"]),
    "dp 2 x ep 2": (EXPERTS, ["parallel.pipeline=1"]),
    "pp 2 x tp 2, not declared": (TENSOR, ["parallel.shards={}"]),
    "pp 2 x ep 2, not declared": (EXPERTS, ["parallel.shards={}"]),
    # Its state has a number for each row of a piece.
    "pp 2 x tp 2, Adafactor": (TENSOR, ["optimizer.name=Adafactor"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, beside the checkpoints of their runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ALONE:
        for file in (EXAMPLES / name, (EXAMPLES / name).with_suffix(".py")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def true(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Loss and norm of each step in one process."""
    return {name: numbers(run_ranks(alone, 1, folder / name)[0]) for name in ALONE}


def alone(path: Path) -> Trained:
    return trained(path, *STEPS, ALONE[path.name], until=4)


def numbers(run: Trained) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in run.steps]


@cache
def parts(folder: Path, name: str) -> tuple[Trained, Trained]:
    """Trains a run; returns the half of it, which is saved, and the whole."""
    file, settings = RUNS[name]
    half, whole = trained_to(folder / file, *STEPS, *settings, ends=(2, 4), saves={2: name})
    return half, whole


def from_half(folder: Path, name: str, *settings: str) -> Trained:
    """Goes on from the half of a run, with other settings."""
    parts(folder, name)
    file, own = RUNS[name]
    resumed = f"train.resume='{name}'"
    return trained(folder / file, *STEPS, *own, *settings, resumed, until=4)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process_also_if_it_was_stopped(
    folder: Path, true: dict[str, list[tuple[float, float]]], name: str
) -> None:
    (half, through), file = parts(folder, name), RUNS[name][0]
    # Along tp dropout must drop the same of what each rank has whole.
    rank = dist.get_rank()
    assert torch.initial_seed() == mixed(0, 4, rank // 2 if file == TENSOR else rank)
    if "Adafactor" not in name:
        for ours, alone in zip(numbers(through), true[file], strict=True):
            assert ours == pytest.approx(alone, rel=rounding(TOKENS))
    through.goes_on(half, from_half(folder, name))


@pytest.mark.ranks(4)
def test_what_lives_apart_has_its_place_in_a_checkpoint(folder: Path) -> None:
    def keys(name: str) -> set[str]:
        parts(folder, name)
        return set(FileSystemReader(folder / name).read_metadata().state_dict_metadata)

    tensor, experts = keys("pp 2 x tp 2, not declared"), keys("pp 2 x ep 2, not declared")
    for place in (0, 1):
        assert f"model.block0.up.weight[tp={place}]" in tensor
        assert f"optimizer.block1.down.weight[tp={place}].exp_avg" in tensor
        assert f"model.block1.experts.up[ep={place}]" in experts
    assert {"model.embedding.weight", "model.norm.bias"} <= tensor & experts
    assert "model.block0.up.weight" not in tensor
    assert not any("[" in key and "experts" not in key for key in experts)
    first, second, *_ = gathered(parts(folder, "pp 2 x tp 2, not declared")[0].values)
    assert not torch.equal(
        first["model.block0.up.weight[tp=0]"], second["model.block0.up.weight[tp=1]"]
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pp 2 x tp 2", ["parallel.dimensions.tp=4"]),
        ("pp 2 x tp 2", ["parallel.dimensions.tp=1"]),
        ("dp 2 x tp 2, in rows", ["parallel.dimensions.tp=1", "parallel.data=4"]),
        (
            "dp 2 x tp 2, in rows",
            ["parallel.dimensions.tp=4", "parallel.data=1", f"gradient_handlers=[{SEQUENCE}]"],
        ),
        (
            "dp 2 x tp 2, in rows",
            ["parallel.data=1", f"gradient_handlers=['pipeline-shared', {SEQUENCE}]"],
        ),
        ("pp 2 x ep 2", ["parallel.dimensions.ep=4", "parallel.pipeline=1", ROWS]),
        ("pp 2 x ep 2, in rows", ["parallel.dimensions.ep=1"]),
        ("dp 2 x ep 2", ["parallel.dimensions.ep=4"]),
    ],
)
def test_a_run_goes_on_with_other_sizes(
    folder: Path, true: dict[str, list[tuple[float, float]]], name: str, settings: list[str]
) -> None:
    found = numbers(from_half(folder, name, *settings))
    for step, alone in zip(found, true[RUNS[name][0]][2:], strict=True):
        assert step == pytest.approx(alone, rel=rounding(TOKENS))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", [*RUNS][:5])
def test_declared_pieces_make_the_whole_tensors(folder: Path, name: str) -> None:
    """Each rank's own pieces are looked for in what `pipegrad.load` returns."""
    (half, _), (file, settings) = parts(folder, name), RUNS[name]
    whole = load_whole(folder / name)
    assert not any("[" in key for key in whole)
    dims = load(folder / file, settings).parallel.shards
    for key, piece in half.values.items():
        tensor = whole[key.removeprefix("model.")]
        dim = next((dim for pattern, dim in dims.items() if fnmatchcase(key, pattern)), None)
        pieces = [tensor] if dim is None else tensor.chunk(2, dim)
        assert sum(torch.equal(piece, part) for part in pieces) == 1


LOW = """
from tensor_parallel import tensor_parallel_gpt

def low(*, topology, **options):
    model = tensor_parallel_gpt(topology=topology, **options).bfloat16()
    model.block0.up.weight.data = model.block0.up.weight.data.T.contiguous().T
    return model
"""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("writer", ["declared", "plain"])
def test_master_copies_and_state_are_read_with_and_without_a_declaration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """They were lost without a word: a master copy became its rounded parameter."""
    monkeypatch.chdir(folder)
    (folder / "low.py").write_text(LOW)
    ways = {"declared": [], "plain": ["parallel.shards={}"]}
    low = ["model.factory='low:low'", "gradients.master_dtype=float32", ALONE[TENSOR]]

    def state(*settings: str, save: bool = False) -> dict[str, torch.Tensor]:
        trainer = trainer_of(folder / TENSOR, *STEPS, *low, *settings)
        if save:
            for number in (1, 2):
                trainer.step(number)
            trainer.saving.save(Path(writer), 2)
        found = {
            f"{name} {key}": torch.as_tensor(value).clone()
            for name, values in trainer._optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        trainer.close()
        return found

    own = state(*ways[writer], save=True)
    assert any(key.endswith("up.weight master") for key in own)
    for settings in ways.values():
        read = state(*settings, f"train.resume='{writer}'")
        assert read.keys() == own.keys()
        assert [key for key in own if not torch.equal(own[key], read[key])] == []


TP, TP_APART, EP_APART, ADAFACTOR = (
    "pp 2 x tp 2",
    "pp 2 x tp 2, not declared",
    "pp 2 x ep 2, not declared",
    "pp 2 x tp 2, Adafactor",
)
REFUSED = [
    (TP_APART, "dimensions.tp=4", "[tp=0] [tp=1] [tp=2] [tp=3]: choose the parallel.dimensions"),
    (TP_APART, "dimensions.tp=1", "locations [tp=0] [tp=1], and here in (everywhere the same)"),
    (EP_APART, "dimensions.ep=4 pipeline=1", "[ep=1], and here in [ep=0] [ep=1] [ep=2] [ep=3]"),
    (TP_APART, "shards={'*.up.weight'=0}", "[tp=0] [tp=1], and here in (everywhere the same)"),
    (TP, "shards={}", "choose the parallel.dimensions, the parallel.data, the parallel.shards"),
    (TP, "shards={'*.upp.weight'=0}", "{'*.upp.weight': 0}: '*.upp.weight' matches no parameter"),
    (TP, "shards={'*.up.weight'=2}", "up.weight' has no dimension 2: its shape is (64, 32)"),
    (TP, "shards={'*.up.weight'=1}", "(everywhere the same), and here in [tp=0] [tp=1]"),
    (TP, "shards={'*.up.weight'=0,'*.up.*'=1}", "is matched with several dimensions, [0, 1]"),
    (ADAFACTOR, "dimensions.tp=1", "row_var' is not kept for each element of the whole tensor"),
    (ADAFACTOR, "dimensions.tp=1 shards={}", "is not kept for each element of the whole tensor"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "settings", "says"), REFUSED)
def test_a_checkpoint_of_other_sizes_is_refused_alike(
    folder: Path, name: str, settings: str, says: str
) -> None:
    parts(folder, name)
    file, own = RUNS[name]
    other = [f"parallel.{setting}" for setting in settings.split()]
    said = refusal(folder / file, *STEPS, *own, *other, f"train.resume='{name}'")
    assert says in said
    assert re.search(r": (train.resume|parallel.shards) = ", said)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs_as_its_first_lines_say(
    name: str,
    true: dict[str, list[tuple[float, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = EXAMPLES / name
    assert f"torchrun --nproc-per-node 4 -m pipegrad train examples/{name}" in path.read_text()
    assert f"--set {ALONE[name]}" in path.read_text()
    monkeypatch.chdir(tmp_path)
    settings = [word for one in [*STEPS, "train.log_every=1"] for word in ("--set", one)]
    code, printed = command("train", str(path), *settings)
    assert not code, printed
    if dist.get_rank() == 0:
        losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", printed)]
        assert losses == pytest.approx([loss for loss, _ in true[name]], abs=1e-4)  # as printed
        assert "equal, bit by bit" in printed


# --- without ranks

FACTORY = """
import torch
from torch import nn

def placed(*, topology, width=4):
    at = {axis: (topology.coordinate(axis), topology.size(axis)) for axis, _ in topology.axes}
    assert topology.mesh is None, "offline"
    layers = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
    layers[0].register_buffer("at", torch.tensor(list(at.values())))
    return layers

def no_tp(*, topology):
    topology.size("tp")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "placed.py").write_text(FACTORY)
    made = tmp_path / "job.toml"
    made.write_text('[model]\nfactory = "placed:placed"\n')
    return made


def config(path: Path, *settings: str) -> Config:
    return load(path, settings)


TWICE = "parallel.dimensions={ep=2, tp=3}"


@pytest.mark.parametrize(
    ("settings", "num_ranks", "sizes"),
    [
        ([TWICE], None, (6, 1, 1, 1)),
        ([TWICE], 24, (24, 4, 1, 1)),
        ([TWICE, "parallel.data=2"], None, (12, 1, 2, 2)),
        ([TWICE, "parallel.data=2"], 24, (24, 2, 2, 2)),
        ([TWICE, "parallel.pipeline=2"], 24, (24, 2, 2, 2)),
        (
            [TWICE, "parallel.pipeline=2", "parallel.data_dimensions=['dp', 'ep']"],
            24,
            (24, 2, 2, 4),
        ),
        ([TWICE, "parallel.data_dimensions=['ep']"], 12, (12, 2, 1, 2)),
    ],
)
def test_pipeline_and_data_share_what_further_dimensions_leave(
    path: Path, settings: list[str], num_ranks: int | None, sizes: tuple[int, ...]
) -> None:
    job = Job(config(path, *settings), num_ranks)
    assert (job.num_ranks, job.pipeline, job.data, job.num_shares) == sizes
    axes = (("pp", job.pipeline), ("dp", job.data), ("ep", 2), ("tp", 3))
    assert job.topology().axes == axes
    assert job.topology().size(job.topology().data) == job.num_shares


@pytest.mark.parametrize(
    ("settings", "num_ranks", "said"),
    [
        (["parallel.dimensions.tp=3"], 4, "tp = 3: 4 ranks cannot be cut into groups of 3"),
        ([TWICE], 3, "parallel.dimensions.ep = 2: 3 ranks cannot be cut into groups of 2"),
        (
            ["parallel.dimensions={ep=2, tp=4}"],
            4,
            "parallel.dimensions = {'ep': 2, 'tp': 4}: 4 ranks cannot be cut into groups of 8",
        ),
        (
            [TWICE, "parallel.pipeline=2", "parallel.data=1"],
            24,
            "pipeline 2 x data 1 x ep 2 x tp 3 are 12 ranks, but there are 24: start that many",
        ),
        (
            [TWICE, "parallel.pipeline=4"],
            12,
            "= 4: pipeline 4 x ep 2 x tp 3 are 24 ranks, but there are 12: start a multiple",
        ),
        (
            [TWICE, "parallel.data_dimensions=['dp', 'cp']"],
            6,
            "parallel.data_dimensions = ['dp', 'cp']: expected of ['dp', 'ep', 'tp'], once each",
        ),
        (
            [TWICE, "parallel.data_dimensions=['dp', 'ep']", "data.batch_size=6"],
            6,
            "= 6: 2 replicas x 4 microbatches do not divide it: choose a multiple of 8",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    path: Path, settings: list[str], num_ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(config(path, *settings), num_ranks)
    assert said in str(caught.value)


def placed(job: Job, rank: int | None = None) -> object:
    """Returns coordinate and size along each axis, as the factory was given them."""
    view = None if rank is None else job.topology(rank)
    return dict(job.model(topology=view).named_buffers())["0.at"].tolist()


def test_a_factory_with_that_parameter_is_given_the_topology(path: Path) -> None:
    job = Job(config(path, TWICE), 12)
    assert placed(job) == [[0, 2], [0, 1], [0, 2], [0, 3]]
    assert placed(job, 11) == [[1, 2], [0, 1], [1, 2], [2, 3]]
    with pytest.raises(ConfigError, match=r"the factory has no option 'topology'; allowed.* width"):
        Job(config(path, "model.topology='ring'"), 1).model()
    with pytest.raises(ConfigError, match=r"the factory fails: .*no dimension 'tp', only \['pp'"):
        Job(config(path, "model.factory='placed:no_tp'"), 1).model()


EXPERT = "gradient_handlers=[{name='expert-parallel', experts=['0.*']}]"
BOTH = ["parallel.dimensions.ep=2", "parallel.data_dimensions=['dp', 'ep']"]


@pytest.mark.parametrize(
    ("handlers", "bare"),
    {
        "all of it": ("gradient_handlers=['data-parallel']", None),
        "experts": (EXPERT, None),
        "one after the other": (
            "gradient_handlers=[{name='sharded', axis='dp'}, {name='data-parallel', axis='ep'}]",
            None,
        ),
        "half of it": ("gradient_handlers=[{name='data-parallel', axis='dp'}]", "0.0.weight"),
        "the other half": ("gradient_handlers=[{name='data-parallel', axis='ep'}]", "0.0.weight"),
        "nothing": ("gradient_handlers=['pipeline-shared']", "0.0.weight"),
    }.values(),
)
def test_each_data_dimension_needs_a_reduction_or_a_divisor_that_stands_for_it(
    path: Path, handlers: str, bare: str | None
) -> None:
    job = Job(config(path, *BOTH, handlers, "parallel.pipeline=2"), 8)
    manifest = job.manifest(job.cut(job.model()))
    if bare is None:
        assert len(job.plans(manifest)) == 8
        return
    with pytest.raises(PlanError, match=f"no handler reduces the gradients of '{bare}' and 1 more"):
        job.plans(manifest)


def test_what_is_printed_names_dimensions_and_divisors(path: Path) -> None:
    job = Job(config(path, *BOTH, EXPERT, "parallel.pipeline=2"), 8)
    cut = job.cut(job.model("meta"))
    told = make_summary(job, cut, job.manifest(cut))
    assert told["dimensions"] == {"ep": 2}
    lines = [line for line in rendered_summary(told, job.schedule) if isinstance(line, str)]
    assert lines[0].startswith("8 ranks: pipeline 2 x data 2 x ep 2, 4 microbatches by 1f1b")
    assert "divided by 2 before they leave: 2 parameters, such as 0.0.weight" in lines
    assert {way["route"]: way["parameters"] for way in told["routes"]} == {
        "replicate-mean(dp)": 2,
        "replicate-mean(dp+ep)": 2,
    }

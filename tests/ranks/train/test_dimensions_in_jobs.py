"""Jobs with further mesh dimensions: sizes, what factories are given, checkpoints, refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pipegrad.errors import ConfigError, PipegradError, PlanError
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.uncut import load as load_whole
from pipegrad.train.config import Config, load
from pipegrad.train.data import mixed
from pipegrad.train.job import Job
from pipegrad.train.summary.summary import make_summary
from pipegrad.train.summary.text import rendered
from pipegrad.train.trainer import Trainer
from tests.support.rounding import rounding

EXAMPLES = Path(__file__).parents[3] / "examples"
TENSOR, EXPERTS = EXAMPLES / "tensor_parallel.toml", EXAMPLES / "mixture_of_experts.toml"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
ALONE = {TENSOR: "parallel.dimensions.tp=1", EXPERTS: "parallel.dimensions.ep=1"}
OWNED = "{name='pipeline-shared', placement='owner'}"
ROWS = f"gradient_handlers=[{OWNED}, {{name='expert-parallel', placement='shard'}}]"
SEQUENCE = "{name='sequence-parallel', parameters=['embedding.*', '*norm*', '*.bias']}"
TOKENS = 4 * 16 * 64  # of all four batches
STEPS = ["train.steps=4", "optimizer.lr=1e-2", "optimizer.schedule={name='StepLR', step_size=2}"]

RUNS: dict[str, tuple[Path, list[str]]] = {
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
}
# Its state has a number for each row of a piece.
ADAFACTOR = "pp 2 x tp 2, Adafactor"
GOING_ON = {**RUNS, ADAFACTOR: (TENSOR, ["optimizer.name=Adafactor"])}
# Each run goes on from its own checkpoint with other sizes, too.
ELSEWHERE: dict[str, list[list[str]]] = {
    "pp 2 x tp 2": [["parallel.dimensions.tp=4"], ["parallel.dimensions.tp=1"]],
    "dp 2 x tp 2, in rows": [
        ["parallel.dimensions.tp=1", "parallel.data=4"],
        ["parallel.dimensions.tp=4", "parallel.data=1", f"gradient_handlers=[{SEQUENCE}]"],
        ["parallel.data=1", f"gradient_handlers=['pipeline-shared', {SEQUENCE}]"],
    ],
    "pp 2 x ep 2": [["parallel.dimensions.ep=4", "parallel.pipeline=1", ROWS]],
    "pp 2 x ep 2, in rows": [["parallel.dimensions.ep=1"]],
    "dp 2 x ep 2": [["parallel.dimensions.ep=4"]],
}

# What is refused, of which run's checkpoint, and in which words.
REFUSED = {
    "more tensor-parallel ranks": ("pp 2 x tp 2, not declared", ["parallel.dimensions.tp=4"]),
    "one tensor-parallel rank": ("pp 2 x tp 2, not declared", ["parallel.dimensions.tp=1"]),
    "more expert ranks": (
        "pp 2 x ep 2, not declared",
        ["parallel.dimensions.ep=4", "parallel.pipeline=1"],
    ),
    "declared behind": ("pp 2 x tp 2, not declared", ["parallel.shards={'*.up.weight'=0}"]),
    "not declared behind": ("pp 2 x tp 2", ["parallel.shards={}"]),
    "a pattern without a parameter": ("pp 2 x tp 2", ["parallel.shards={'*.upp.weight'=0}"]),
    "a dimension that is not there": ("pp 2 x tp 2", ["parallel.shards={'*.up.weight'=2}"]),
    "another dimension": ("pp 2 x tp 2", ["parallel.shards={'*.up.weight'=1}"]),
    "two dimensions": ("pp 2 x tp 2", ["parallel.shards={'*.up.weight'=0, '*.up.*'=1}"]),
    "state of pieces": (ADAFACTOR, ["parallel.dimensions.tp=1"]),
    "state of pieces, not declared behind": (
        ADAFACTOR,
        ["parallel.dimensions.tp=1", "parallel.shards={}"],
    ),
}
SAID = {
    "more tensor-parallel ranks": "is there in the places [tp=0] [tp=1], and here in [tp=0] [tp=1] "
    "[tp=2] [tp=3]: choose the parallel.dimensions",
    "one tensor-parallel rank": "places [tp=0] [tp=1], and here in (everywhere the same)",
    "more expert ranks": "places [ep=0] [ep=1], and here in [ep=0] [ep=1] [ep=2] [ep=3]",
    "declared behind": "places [tp=0] [tp=1], and here in (everywhere the same)",
    "not declared behind": "places (everywhere the same), and here in [tp=0] [tp=1]: choose the "
    "parallel.dimensions, the parallel.data, the parallel.shards",
    "a pattern without a parameter": "parallel.shards = {'*.upp.weight': 0}: '*.upp.weight' "
    "matches no parameter",
    "a dimension that is not there": "'block0.up.weight' has no dimension 2: its shape is (64, 32)",
    "another dimension": "places (everywhere the same), and here in [tp=0] [tp=1]",
    "two dimensions": "is matched with several dimensions, [0, 1]",
    "state of pieces": "heads_in.weight.row_var' is not kept for each element of the whole tensor",
    "state of pieces, not declared behind": "is not kept for each element of the whole tensor",
}
Told = list[tuple[float, float]]


def trained(path: Path, settings: list[str], until: int, saved: str = "") -> tuple[Told, Any]:
    """Returns losses and norms up to a step, and this rank's parameters after it."""
    trainer = Trainer(partial(load, path, [*STEPS, *settings]))
    told = [trainer.step(number) for number in range(trainer.first_step, until + 1)]
    if saved:
        trainer.save(Path(saved), until)
    trainer.sync.check_replicas()
    held = {name: tensor.clone() for name, tensor in trainer._state.tensors().items()}
    trainer.close()
    return [(one.loss, one.grad_norm) for one in told], held


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {}
    for name, (path, settings) in GOING_ON.items():
        found[name] = {
            "through": trained(path, settings, 4),
            "first half": trained(path, settings, 2, name),
            "second half": trained(path, [*settings, f"train.resume='{name}'"], 4),
            "seed": torch.initial_seed(),
        }
    for name, others in ELSEWHERE.items():
        path, own = RUNS[name]
        again = f"train.resume='{name}'"
        found[name]["elsewhere"] = [trained(path, [*own, *other, again], 4)[0] for other in others]
    for name, (saved, settings) in REFUSED.items():
        path, own = GOING_ON[saved]
        try:
            trained(path, [*own, *settings, f"train.resume='{saved}'"], 4)
        except PipegradError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(histories, 4, str(folder), timeout_seconds=500)


def one_process(path: Path) -> Told:
    return run_ranks(trained, 1, path, [ALONE[path]], 4)[0][0]


@pytest.fixture(scope="module")
def true() -> dict[Path, Told]:
    return {path: one_process(path) for path in ALONE}


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_one_process(
    told: tuple[Path, list[dict[str, Any]]], true: dict[Path, Told], name: str
) -> None:
    for rank in told[1]:
        for ours, alone in zip(rank[name]["through"][0], true[RUNS[name][0]], strict=True):
            assert ours == pytest.approx(alone, rel=rounding(TOKENS))


@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_that_goes_on_is_the_one_that_was_not_stopped(
    told: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    for rank in told[1]:
        (losses, held), (first, _), (second, again) = (
            rank[name][part] for part in ("through", "first half", "second half")
        )
        assert first + second == losses
        assert held.keys() == again.keys()
        assert all(torch.equal(held[key], again[key]) for key in held)


def test_ranks_that_compute_the_same_data_together_draw_the_same(
    told: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Along tp dropout must drop the same of what each rank has whole."""
    for name, (path, _) in RUNS.items():
        places = [0, 0, 1, 1] if path == TENSOR else range(4)
        expected = [mixed(0, 4, place) for place in places]
        assert [rank[name]["seed"] for rank in told[1]] == expected, name


def test_what_lives_apart_has_its_place_in_a_checkpoint(
    told: tuple[Path, list[dict[str, Any]]],
) -> None:
    def keys(name: str) -> set[str]:
        return set(FileSystemReader(told[0] / name).read_metadata().state_dict_metadata)

    tensor, experts = keys("pp 2 x tp 2, not declared"), keys("pp 2 x ep 2, not declared")
    for place in (0, 1):
        assert f"model.block0.up.weight[tp={place}]" in tensor
        assert f"optimizer.block1.down.weight[tp={place}].exp_avg" in tensor
        assert f"model.block1.experts.up[ep={place}]" in experts
    assert {"model.embedding.weight", "model.norm.bias"} <= tensor & experts
    assert "model.block0.up.weight" not in tensor
    assert not any("[" in key and "experts" not in key for key in experts)
    shards = [rank["pp 2 x tp 2, not declared"]["through"][1] for rank in told[1][:2]]
    assert not torch.equal(
        shards[0]["model.block0.up.weight[tp=0]"], shards[1]["model.block0.up.weight[tp=1]"]
    )


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_run_goes_on_with_other_sizes(
    told: tuple[Path, list[dict[str, Any]]], true: dict[Path, Told], name: str
) -> None:
    for rank in told[1]:
        for ours in rank[name]["elsewhere"]:
            for step, alone in zip(ours, true[RUNS[name][0]][2:], strict=True):
                assert step == pytest.approx(alone, rel=rounding(TOKENS))


@pytest.mark.parametrize("name", [name for name in RUNS if "not declared" not in name])
def test_declared_pieces_make_the_whole_tensors(
    told: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    """Each rank's own pieces are looked for in what `pipegrad.load` returns."""
    whole = load_whole(told[0] / name)
    assert not any("[" in key for key in whole)
    path, settings = RUNS[name]
    dims = load(path, settings).parallel.shards
    for rank in told[1]:
        for key, piece in rank[name]["first half"][1].items():
            tensor = whole[key.removeprefix("model.")]
            dim = next((dim for pattern, dim in dims.items() if fnmatchcase(key, pattern)), None)
            if dim is None:
                assert torch.equal(tensor, piece)
            else:
                pieces = tensor.chunk(2, dim)
                assert sum(torch.equal(piece, part) for part in pieces) == 1


LOW = """
from tensor_parallel import tensor_parallel_gpt

def low(*, topology, **options):
    model = tensor_parallel_gpt(topology=topology, **options).bfloat16()
    model.block0.up.weight.data = model.block0.up.weight.data.T.contiguous().T
    return model
"""


def masters(folder: str) -> dict[str, dict[str, Any]]:
    """Returns what the optimizer steps, saved and read with and without a declaration."""
    os.chdir(folder)
    found: dict[str, dict[str, Any]] = {}
    declared = {"declared": [], "plain": ["parallel.shards={}"]}
    low = ["model.factory='low:low'", "gradients.master_dtype=float32"]
    alone = ["parallel.dimensions.tp=1", *low]
    for writer, own in declared.items():
        for reader, other in {"itself": None, **declared}.items():
            resumed = own if other is None else [*other, f"train.resume='{writer}'"]
            trainer = Trainer(partial(load, Path("job.toml"), [*STEPS, *alone, *resumed]))
            if other is None:
                for number in (1, 2):
                    trainer.step(number)
                trainer.save(Path(writer), 2)
            state = trainer._optimizer.state_dict()["state"]
            found[f"{reader} of {writer}"] = {
                f"{name} {key}": torch.as_tensor(value).clone()
                for name, values in state.items()
                for key, value in values.items()
            }
            trainer.close()
    return found


def test_master_copies_and_state_are_read_with_and_without_a_declaration(tmp_path: Path) -> None:
    """They were lost without a word: a master copy became its rounded parameter."""
    (tmp_path / "low.py").write_text(LOW)
    for file in (TENSOR, TENSOR.with_suffix(".py")):
        (tmp_path / file.name.replace(TENSOR.name, "job.toml")).write_text(file.read_text())
    (found,) = run_ranks(masters, 1, str(tmp_path))
    for writer in ("declared", "plain"):
        own = found[f"itself of {writer}"]
        assert any(key.endswith("up.weight master") for key in own)
        for reader in ("declared", "plain"):
            read = found[f"{reader} of {writer}"]
            assert read.keys() == own.keys()
            assert [key for key in own if not torch.equal(own[key], read[key])] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_of_other_sizes_is_refused_alike(
    told: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    for rank in told[1]:
        assert SAID[name] in rank[name]
        assert re.search(r": (train.resume|parallel.shards) = ", rank[name])
        assert rank[name] == told[1][0][name]


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_torchrun_runs_the_example_as_its_first_lines_say(
    path: Path, true: dict[Path, Told], tmp_path: Path
) -> None:
    assert f"torchrun --nproc-per-node 4 -m pipegrad train examples/{path.name}" in path.read_text()
    assert f"--set {ALONE[path]}" in path.read_text()
    settings = [word for setting in STEPS for word in ("--set", setting)]
    ran = subprocess.run(
        [*TORCHRUN, "-m", "pipegrad", "train", str(path), *settings, "--set", "train.log_every=1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", ran.stdout)]
    assert losses == pytest.approx([loss for loss, _ in true[path]], abs=1e-4)  # as printed
    assert "bit-identical" in ran.stdout


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
    {
        "too few ranks": (
            ["parallel.dimensions.tp=3"],
            4,
            "parallel.dimensions.tp = 3: 4 ranks cannot be cut into groups of 3",
        ),
        "too few for both": (
            [TWICE],
            3,
            "parallel.dimensions.ep = 2: 3 ranks cannot be cut into groups of 2",
        ),
        "too few for the product": (
            ["parallel.dimensions={ep=2, tp=4}"],
            4,
            "parallel.dimensions = {'ep': 2, 'tp': 4}: 4 ranks cannot be cut into groups of 8",
        ),
        "all sizes": (
            [TWICE, "parallel.pipeline=2", "parallel.data=1"],
            24,
            "pipeline 2 x data 1 x ep 2 x tp 3 are 12 ranks, but there are 24: start that many",
        ),
        "a pipeline too long": (
            [TWICE, "parallel.pipeline=4"],
            12,
            "= 4: pipeline 4 x ep 2 x tp 3 are 24 ranks, but there are 12: start a multiple",
        ),
        "a name that is taken": (["parallel.dimensions={dp=2}"], 2, "other than 'pp' and 'dp'"),
        "a name that is no word": (
            ["parallel.dimensions={'t p'=2}"],
            2,
            "parallel.dimensions = {'t p': 2}: should name dimensions by words",
        ),
        "a size of nothing": (
            ["parallel.dimensions.tp=0"],
            2,
            "parallel.dimensions.tp = 0: should be greater than or equal to 1",
        ),
        "no data": (["parallel.data_dimensions=[]"], 2, "should have at least 1 item"),
        "unknown data": (
            [TWICE, "parallel.data_dimensions=['dp', 'cp']"],
            6,
            "parallel.data_dimensions = ['dp', 'cp']: expected of ['dp', 'ep', 'tp'], once each",
        ),
        "data twice": (["parallel.data_dimensions=['dp', 'dp']"], 2, "expected of ['dp'], once"),
        "a batch too small": (
            [TWICE, "parallel.data_dimensions=['dp', 'ep']", "data.batch_size=6"],
            6,
            "= 6: 2 replicas x 4 microbatches do not divide it: choose a multiple of 8",
        ),
    }.values(),
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
    lines = [line for line in rendered(told, job.schedule) if isinstance(line, str)]
    assert lines[0].startswith("8 ranks: pipeline 2 x data 2 x ep 2, 4 microbatches by 1f1b")
    assert "divided by 2 before they leave: 2 parameters, such as 0.0.weight" in lines
    assert {way["route"]: way["parameters"] for way in told["routes"]} == {
        "replicate-mean(dp)": 2,
        "replicate-mean(dp+ep)": 2,
    }

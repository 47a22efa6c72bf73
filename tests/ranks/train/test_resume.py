"""A job that goes on from a checkpoint is the job that was never stopped, in any cut.

`JOBS` has what a checkpoint keeps: each job, and where it stops. Who goes on with it are the rows
of the tests: the same job, another cut of it, and jobs that are noted or refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipegrad
from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.optimizer import Update
from tests.support.checkpoints import index_of
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, Trained, refusal, trained, trained_to, with_job

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
RATES = ["optimizer.lr=1e-2", "optimizer.schedule={name='StepLR', step_size=2, gamma=0.5}"]
BASE = [*RATES, "gradients.clip_norm=1", "train.steps=6"]
DROPOUT, REPLICAS = "model.dropout=0.25", "parallel.data=2"
OWNED = "{name='pipeline-shared', placement='owner'}"
SHARDED = ["gradient_handlers=['pipeline-shared', 'sharded']", REPLICAS]
OWNER = [f"gradient_handlers=[{OWNED}, 'sharded']"]
MUON_RATE, STEPS_OF_MUON = 0.01, 3
TOKENS = 4 * 16 * 64  # of all batches of an example
OF_MUON = [f"optimizer={{name='Muon', lr={MUON_RATE}, others={{name='AdamW', lr=1e-3}}}}"]
MUON = [*OF_MUON, "gradient_handlers=['pipeline-shared', 'owned']", REPLICAS]
DRAWN = ["data={dataset='data_functions:drawn'}", REPLICAS]
LOADED = ["data={dataset='data_functions:loaded'}", REPLICAS]
GENERATED = ["data={dataset='data_functions:generated'}"]


def hook(chosen: str) -> list[str]:
    handlers = f"['pipeline-shared', {{name='data-parallel', hook={chosen}}}]"
    return [DROPOUT, REPLICAS, f"gradient_handlers={handlers}"]


def keeping(handler: str) -> list[str]:
    return [DROPOUT, REPLICAS, f"gradient_handlers=['pipeline-shared', {handler}]"]


CODED = ["parallel.codecs={gradients='topk', activations='int8'}", DROPOUT]
FADING, ODD = keeping("{name='keeping:Fading', by=2}"), keeping("'keeping:Odd'")
KEEPING = """
from fractions import Fraction
from pipegrad_handlers.data_parallel import DataParallel
class Fading(DataParallel):  # sends less each time
    def __init__(self, *, by: int = 2):
        super().__init__()
        self.by, self.calls = by, 0
    def launch(self, bucket, reduction, group):
        self.calls += 1
        bucket.payload.div_(self.by * self.calls)
        return super().launch(bucket, reduction, group)
    def state_dict(self):
        return {"by": self.by, "calls": self.calls}
    def load_state_dict(self, state):
        if state.get("by", self.by) != self.by:
            raise ValueError("it fades by another number")
        self.calls = state.get("calls", 0)
class Odd(Fading):
    def state_dict(self):
        return {"by": Fraction(2)}
"""
LOW = """
from tensor_parallel import tensor_parallel_gpt
def low(*, topology, **options):
    model = tensor_parallel_gpt(topology=topology, **options).bfloat16()
    model.block0.up.weight.data = model.block0.up.weight.data.T.contiguous().T
    return model
"""
MASTER = [
    "model.factory='low:low'",
    "gradients.master_dtype=float32",
    "parallel.dimensions.tp=1",
]
PLAIN = "parallel.shards={}"
APART = ["parallel.pipeline=2", "parallel.data=2", "train.steps=6", "gradients.clip_norm=1"]


def meeting(every: int, shared: str = "'pipeline-shared'") -> str:
    return f"gradient_handlers=[{shared}, {{name='diloco', every={every}}}]"


IN_ROWS = f"gradient_handlers=[{OWNED}, {{name='expert-parallel', placement='shard'}}]"
SEQUENCE = "{name='sequence-parallel', parameters=['embedding.*', '*norm*', '*.bias']}"
TENSOR_ROWS = [REPLICAS, f"gradient_handlers=['sharded', {SEQUENCE}]"]
EXPERT_ROWS = [IN_ROWS, "parallel.schedule=zb-h1"]
FSDP2 = ["parallel.prepare=prepared:fsdp2", "gradient_handlers=['pipeline-shared']"]
FSDP = ["parallel.pipeline=2", *FSDP2]
COPIES = [
    "parallel.pipeline=1",
    "parallel.dimensions={fsdp=2}",
    "parallel.data_dimensions=['dp', 'fsdp']",
    *FSDP2,
]
PLAN = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def plan(stages, topology):
    styles = {"1.0": ColwiseParallel(), "2.0": RowwiseParallel()}
    for name, module in [part for stage in stages for part in stage.named_modules()]:
        if name in styles:
            parallelize_module(module, topology.mesh["tp"], styles[name], src_data_rank=None)
"""
MEAN = "{name='sequence-parallel', op='mean', parameters=['0.*', '3.*', '4.*']}"
TENSOR = [
    "parallel.dimensions={tp=2}",
    "parallel.prepare='plan:plan'",
    f"gradient_handlers=['pipeline-shared', 'data-parallel', {MEAN}]",
]
TOKEN_MEAN = [
    "train.loss_reduction=token_mean",
    "parallel.schedule=interleaved-1f1b",
    "parallel.boundaries=[1, 2, 3]",
    "train.recompute=true",
]
NET = "model.factory=factories:Net"
COMMON = ["gradients.clip_norm=1", "parallel.microbatches=2"]


class Job(NamedTuple):
    """A job, and after which steps it stops.

    Attributes:
        base: Settings of everybody who goes on with it.
        tokens: Of all batches, for the rounding of a loss.
        alone: What makes it a job of one process, which it is compared with; "" if it is not here.
    """

    ranks: int
    settings: Sequence[str]
    base: Sequence[str] = BASE
    stops: tuple[int, ...] = (3,)
    end: int = 6
    file: str = "small.toml"
    tokens: int = 12 * 8 * 16
    alone: str = ""


def of_data(*settings: str, stop: int = 7) -> Job:
    return Job(2, settings, (), (stop,), 12)


ALONE = {
    "tensor_parallel": "parallel.dimensions.tp=1",
    "mixture_of_experts": "parallel.dimensions.ep=1",
}


def of_example(name: str, *settings: str) -> Job:
    base = ["train.steps=4", "optimizer.lr=1e-2", "optimizer.schedule={name='StepLR', step_size=2}"]
    return Job(4, settings, base, (2,), 4, f"{name}.toml", TOKENS, ALONE[name])


def of_dtensors(*settings: str) -> Job:
    alone = NET if NET in settings else "parallel.pipeline=1"
    return Job(4, settings, COMMON, (2,), 4, tokens=4 * 8 * 16, alone=alone)


LOW_JOB = of_example("tensor_parallel", *MASTER)._replace(ranks=1, alone="")
JOBS = {
    "plain": Job(2, [DROPOUT]),
    "steady": Job(2, []),
    "sharded": Job(2, SHARDED),
    "owner": Job(2, OWNER),
    # Coarser than what parameters are in.
    "stored": Job(2, [*SHARDED, "gradients.master_dtype='bfloat16'"]),
    "muon": Job(2, MUON),
    "averages of a forward": Job(
        2, ["model={factory='factories:averaging'}", "parallel.boundaries=[2]"]
    ),
    "what a handler keeps": Job(2, FADING, stops=(4,)),
    "a hook": Job(2, hook("'bf16_compress_hook'"), stops=(4,)),
    "errors of codecs": Job(2, CODED, stops=(4,)),
    # They stop in the middle of the second epoch.
    "batches of a generator": of_data(*GENERATED),
    "batches of a loader": of_data(*LOADED),
    "batches that are drawn": of_data(*DRAWN),
    # After step 3 replicas are apart, after step 4 they have just met.
    "replicas apart": Job(4, [meeting(2)], APART, (3, 4)),
    "owners apart": Job(4, [meeting(2, OWNED)], APART),
    "replicas apart in fp16": Job(4, [meeting(2), "train.precision=fp16"], APART),
    "pp 2 x tp 2": of_example("tensor_parallel"),
    "dp 2 x tp 2, in rows": of_example("tensor_parallel", *TENSOR_ROWS),
    "pp 2 x ep 2": of_example("mixture_of_experts"),
    "pp 2 x ep 2, in rows": of_example("mixture_of_experts", *EXPERT_ROWS),
    "dp 2 x ep 2": of_example("mixture_of_experts", "parallel.pipeline=1"),
    "tp, not declared": of_example("tensor_parallel", PLAIN),
    "ep, not declared": of_example("mixture_of_experts", PLAIN),
    "master copies": LOW_JOB,
    "master copies, not declared": LOW_JOB._replace(settings=[*MASTER, PLAIN]),
    # Its state has a number for each row of a piece.
    "tp, Adafactor": of_example("tensor_parallel", "optimizer.name=Adafactor")._replace(alone=""),
    "pp 2 x fsdp 2": of_dtensors(*FSDP),
    "pp 2 x fsdp 2, token mean": of_dtensors(*FSDP, *TOKEN_MEAN),
    "copies 2 x fsdp 2": of_dtensors(*COPIES),
    "pp 2 x tp 2, prepared": of_dtensors("parallel.pipeline=2", *TENSOR),
    "dp 2 x tp 2, prepared": of_dtensors("parallel.pipeline=1", REPLICAS, *TENSOR),
    "pp 2 x fsdp 2, of a module": of_dtensors(NET, *FSDP),
    "without DTensors": of_dtensors("parallel.pipeline=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The jobs, beside their checkpoints."""
    made = with_job(tmp_path_factory.mktemp("resume"))
    for path in EXAMPLES.glob("*.*"):
        if path.stem in ("tensor_parallel", "mixture_of_experts"):
            (made / path.name).write_bytes(path.read_bytes())
    (made / "keeping.py").write_text(KEEPING)
    (made / "low.py").write_text(LOW)
    (made / "plan.py").write_text(PLAN)
    (made / "other.txt").write_text("other words " * 99)
    return made


@cache
def runs(folder: Path, name: str) -> dict[int, Trained]:
    """Trains a job; returns what is known after each stop, where it is saved, and in the end."""
    job = JOBS[name]
    ends, saves = (*job.stops, job.end), {step: f"{name} {step}" for step in job.stops}
    settings = (*job.base, *job.settings)
    found = trained_to(folder / job.file, *settings, ends=ends, saves=saves)
    return dict(zip(ends, found, strict=True))


def resuming(folder: Path, name: str, stop: int = 0) -> tuple[Path, list[str]]:
    """Returns the file and the settings of everybody who goes on from a stop of a job."""
    runs(folder, name)
    job = JOBS[name]
    return folder / job.file, [*job.base, f"train.resume='{name} {stop or job.stops[0]}'"]


def from_stop(folder: Path, name: str, *settings: str, stop: int = 0, until: int = 0) -> Trained:
    path, common = resuming(folder, name, stop)
    return trained(path, *common, *settings, until=until or JOBS[name].end)


def bare(run: Trained) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names in the model."""
    return {name.partition(".")[2]: tensor for name, tensor in run.values.items()}


def keys_of(folder: Path, name: str) -> set[str]:
    runs(folder, name)
    return set(index_of(folder / f"{name} {JOBS[name].stops[0]}")["tensors"])


def on_ranks(name: str, *values: Any) -> Any:
    """Returns a row of a table about a job, for a test on as many ranks as the job has."""
    return pytest.param(name, *values, marks=pytest.mark.ranks(JOBS[name].ranks))


@cache
def one_process(folder: Path, file: str, base: tuple[str, ...], alone: str) -> list[Any]:
    """Returns loss and norm of each step of a job in one process."""
    [run] = run_ranks(trained_alone, 1, folder / file, *base, alone)
    return [(step.loss, step.grad_norm) for step in run.steps]


def trained_alone(path: Path, *settings: str) -> Trained:
    return trained(path, *settings, until=4)


@pytest.fixture
def truth(folder: Path, name: str) -> list[Any]:
    job = JOBS[name]
    return one_process(folder, job.file, tuple(job.base), job.alone)


@pytest.mark.parametrize("name", [on_ranks(name) for name, job in JOBS.items() if job.alone])
def test_a_job_is_that_of_one_process(folder: Path, name: str, truth: list[Any]) -> None:
    steps = runs(folder, name)[JOBS[name].end].steps
    for step, true in zip(steps, truth, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx(true, rel=rounding(JOBS[name].tokens))


@pytest.mark.parametrize(
    "name", [on_ranks(name) for name, job in JOBS.items() if job.alone in ALONE.values()][:5]
)
def test_declared_pieces_make_the_whole_tensors(folder: Path, name: str) -> None:
    """Each rank's own pieces are looked for in what `pipegrad.load` returns."""
    job, half = JOBS[name], runs(folder, name)[2]
    whole = pipegrad.load(folder / f"{name} 2")
    assert not any("[" in key for key in whole)
    dims = load(folder / job.file, job.settings).parallel.shards
    for key, piece in half.values.items():
        tensor = whole[key.removeprefix("model.")]
        dim = next((dim for pattern, dim in dims.items() if fnmatchcase(key, pattern)), None)
        pieces = [tensor] if dim is None else tensor.chunk(2, dim)
        assert sum(torch.equal(piece, part) for part in pieces) == 1


@pytest.mark.parametrize(
    ("name", "stop", "settings"),
    [
        *(on_ranks(n, stop, job.settings) for n, job in JOBS.items() for stop in job.stops),
        # Master copies were lost without a word: they became their rounded parameters.
        on_ranks("master copies", 2, [*MASTER, PLAIN]),
        on_ranks("master copies, not declared", 2, MASTER),
    ],
)
def test_going_on_is_never_having_stopped(
    folder: Path, name: str, stop: int, settings: list[str]
) -> None:
    found = runs(folder, name)
    resumed = from_stop(folder, name, *settings, stop=stop)
    found[JOBS[name].end].goes_on(found[stop], resumed)
    assert resumed.notes == ()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        on_ranks("steady", [REPLICAS]),
        on_ranks("steady", ["parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"]),
        on_ranks("steady", ["parallel.schedule=gpipe", "parallel.boundaries=[1]"]),
        on_ranks("steady", SHARDED),
        on_ranks("sharded", []),
        on_ranks("sharded", OWNER),
        on_ranks("owner", SHARDED),
        on_ranks("pp 2 x tp 2", ["parallel.dimensions.tp=4"]),
        on_ranks("pp 2 x tp 2", ["parallel.dimensions.tp=1"]),
        on_ranks(
            "dp 2 x tp 2, in rows",
            [*TENSOR_ROWS, "parallel.dimensions.tp=1", "parallel.data=4"],
        ),
        on_ranks(
            "dp 2 x tp 2, in rows",
            ["parallel.dimensions.tp=4", f"gradient_handlers=[{SEQUENCE}]"],
        ),
        on_ranks("dp 2 x tp 2, in rows", [f"gradient_handlers=['pipeline-shared', {SEQUENCE}]"]),
        on_ranks("pp 2 x ep 2", ["parallel.dimensions.ep=4", "parallel.pipeline=1", IN_ROWS]),
        on_ranks("pp 2 x ep 2, in rows", [*EXPERT_ROWS, "parallel.dimensions.ep=1"]),
        on_ranks("dp 2 x ep 2", ["parallel.pipeline=1", "parallel.dimensions.ep=4"]),
        on_ranks("pp 2 x fsdp 2", ["parallel.pipeline=2", *TENSOR]),
        on_ranks("pp 2 x tp 2, prepared", COPIES),
        on_ranks("pp 2 x tp 2, prepared", ["parallel.pipeline=2"]),
        on_ranks("copies 2 x fsdp 2", ["parallel.pipeline=2"]),
        on_ranks("without DTensors", FSDP),
        on_ranks("without DTensors", COPIES),
    ],
)
def test_any_cut_goes_on_from_any_other(folder: Path, name: str, settings: list[str]) -> None:
    job, stop = JOBS[name], JOBS[name].stops[0]
    whole, found = runs(folder, name)[job.end], from_stop(folder, name, *settings)
    most = rounding(job.tokens)
    assert found.losses == pytest.approx(whole.losses[stop:], rel=most)
    if job.ranks == 4:
        norms = [step.grad_norm for step in whole.steps[stop:]]
        assert [step.grad_norm for step in found.steps] == pytest.approx(norms, rel=most)
        return
    every = {name: tensor for rank in gathered(bare(whole)) for name, tensor in rank.items()}
    for key, tensor in bare(found).items():
        torch.testing.assert_close(tensor, every[key], rtol=1e-3, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cut", [[], [REPLICAS]])
def test_whole_matrices_are_found_by_name_wherever_they_are_stepped(
    folder: Path, cut: list[str]
) -> None:
    """Muon's matrix products are in bf16: where gradients differ by a rounding, so may its steps.

    A step moves an element by at most its rate, here times the root of two, at 8 bits.
    """
    whole = bare(runs(folder, "muon")[6])
    limit = STEPS_OF_MUON * MUON_RATE * 2**0.5 * 2.0**-8
    for name, tensor in bare(from_stop(folder, "muon", *OF_MUON, *cut)).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=limit)


@pytest.mark.ranks(2)
def test_what_was_stored_coarser_goes_on_finer(folder: Path) -> None:
    stored = runs(folder, "stored")[6].losses[3:]
    finer = from_stop(folder, "stored", REPLICAS).losses
    assert finer == pytest.approx(stored, rel=1e-2)
    assert finer != stored


@pytest.mark.ranks(4)
def test_what_lives_apart_has_its_place_in_a_checkpoint(folder: Path) -> None:
    tensor, experts = keys_of(folder, "tp, not declared"), keys_of(folder, "ep, not declared")
    for place in (0, 1):
        assert f"model.block0.up.weight[tp={place}]" in tensor
        assert f"optimizer.block1.down.weight[tp={place}].exp_avg" in tensor
        assert f"model.block1.experts.up[ep={place}]" in experts
    assert {"model.embedding.weight", "model.norm.bias"} <= tensor & experts
    assert "model.block0.up.weight" not in tensor
    assert [key for key in experts if "[ep=" in key and "experts" not in key] == []
    first, second, *_ = gathered(runs(folder, "tp, not declared")[2].values)
    assert not torch.equal(
        first["model.block0.up.weight[tp=0]"], second["model.block0.up.weight[tp=1]"]
    )


@pytest.mark.ranks(4)
def test_replicas_end_as_one_model_that_can_be_exported_after_a_meeting(folder: Path) -> None:
    values = {k.partition("[")[0]: v for k, v in runs(folder, "replicas apart")[6].values.items()}
    other = gathered(values)[dist.get_rank() ^ 1]  # the other replica of this stage
    assert values.keys() == other.keys()
    assert all(torch.equal(values[key], other[key]) for key in values)
    model = pipegrad.load(folder / "replicas apart 4")
    assert values.keys() <= {f"model.{name}" for name in model}
    with pytest.raises(PipegradError, match="export a checkpoint of a step after which they have"):
        pipegrad.load(folder / "replicas apart 3")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("what a handler keeps", ["extra.0.handlers", "extra.1.handlers"]),
        # The first stage sends no gradient, so its rank has no errors of codecs.
        ("errors of codecs", ["extra.1.handlers"]),
        ("a hook", []),
    ],
)
def test_a_checkpoint_has_errors_of_handlers_if_there_are_any(
    folder: Path, name: str, kept: list[str]
) -> None:
    assert sorted(key for key in keys_of(folder, name) if key.endswith(".handlers")) == kept


AFRESH = "^train.resume: error feedback starts afresh: "
IS_ANOTHER = "^train.resume: this is not the run that wrote the checkpoint: "


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("plain", [DROPOUT, "data.files=['other.txt']"], f"{IS_ANOTHER}data.files was text "),
        ("plain", [DROPOUT, "train.seed=1"], f"{IS_ANOTHER}train.seed was 0, and is 1"),
        ("plain", [DROPOUT, "data.batch_size=16"], f"{IS_ANOTHER}data.batch_size was 8, and is 16"),
        ("plain", [DROPOUT, "optimizer.name=Adam"], "optimizer.name was 'AdamW', and is 'Adam'"),
        ("errors of codecs", [*CODED, REPLICAS], f"{AFRESH}.*of another plan"),
        ("errors of codecs", [*CODED, "parallel.boundaries=[1]"], f"{AFRESH}.*cut"),
        ("what a handler keeps", keeping("{name='keeping:Fading', by=3}"), f"{AFRESH}.*it fades"),
        ("what a handler keeps", [DROPOUT, REPLICAS], f"{AFRESH}.*of another plan"),
        ("a hook", hook("'fp16_compress_hook'"), ""),
    ],
)
def test_who_goes_on_in_another_way_is_told(
    folder: Path, name: str, settings: list[str], says: str
) -> None:
    stop = JOBS[name].stops[0]
    run = from_stop(folder, name, *settings, until=stop + 1)
    assert [step.step for step in run.steps] == [stop + 1]
    assert gathered(run.notes) == [run.notes] * 2
    assert len(run.notes) == bool(says)
    assert all(re.search(says, note) for note in run.notes), run.notes


@pytest.mark.ranks(2)
def test_what_could_not_be_read_again_is_not_written(folder: Path) -> None:
    job = folder / "small.toml"
    said = refusal(job, *ODD, save="odd")
    assert "no checkpoint can be written: what handlers ['keeping:Odd'] keep from step to" in said
    assert "fractions.Fraction" in said
    assert not (folder / "odd").exists()


@pytest.mark.ranks(2)
def test_state_of_another_version_is_refused_as_damage(folder: Path) -> None:
    job = folder / "small.toml"
    with mock.patch.object(Update, "state_dict", return_value={"of": "tomorrow"}):
        trained(job, until=1, save="checkpoint-1")
    said = refusal(job, "train.resume=checkpoint-1", until=2)
    assert (
        "train.resume = 'checkpoint-1': checkpoint-1 has another kind of state of 'update': Ke"
        in said
    )


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        on_ranks(
            "steady",
            ["model.width=9"],
            "or layout: '0.weight' is (256, 9) here and (25",
        ),
        on_ranks("steady", ["model.layers=1"], "which the model does not have; the model has '2."),
        on_ranks(
            "steady",
            ["optimizer={name='SGD', momentum=0.9}"],
            "is of another optimizer: of ['AdamW'], not ['SGD']",
        ),
        on_ranks(
            "steady",
            ["optimizer.amsgrad=true"],
            "keeps other state: amsgrad of '0.weight' is True here, and False there",
        ),
        on_ranks(
            "muon",
            [*MUON, "optimizer.others={name='SGD'}"],
            "is of another optimizer: of ['Muon', 'AdamW'], not ['Muon', 'SGD']",
        ),
        on_ranks("steady", ["train.steps=3"], "the checkpoint is of step 3: nothing is left to do"),
        on_ranks("replicas apart", [meeting(4)], "6 is no multiple of 4, the steps after which h"),
        on_ranks("replicas apart", [], "[dp=0]', "),
        on_ranks(
            "replicas apart",
            [meeting(2), "parallel.shards={'1.0.weight'=0}"],
            "by handler 'diloco', and each has '1.0.weight': a checkpoint would take",
        ),
        on_ranks(
            "replicas apart",
            [meeting(3)],
            "it was saved with the outer step every=2, lr=0.7, momentum=0.9, and",
        ),
        on_ranks(
            "replicas apart",
            [meeting(2, OWNED)],
            "replicas that train alone cannot go on: the state of handlers is of",
        ),
        on_ranks(
            "pp 2 x tp 2",
            ["parallel.shards={'*.upp.weight'=0}"],
            "shards: '*.upp.weight' matches no parameter",
        ),
        on_ranks(
            "tp, Adafactor",
            ["optimizer.name=Adafactor", "parallel.dimensions.tp=1"],
            "which is not kept for each element of the whole tensor",
        ),
    ],
)
def test_what_cannot_be_gone_on_from(
    folder: Path, name: str, settings: list[str], says: str
) -> None:
    path, common = resuming(folder, name)
    assert says in refusal(path, *common, *settings, until=JOBS[name].end)

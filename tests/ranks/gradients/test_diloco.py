"""Replicas that train alone and meet are those of a simulation in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.errors import PipegradError
from tests.support.gradients.cases import rank
from tests.support.gradients.diloco import REPLICAS, ROWS, Run, Trainer, simulate
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(4)
INNER = {"name": "data-parallel", "axis": "dp"}
SHARDED = {"name": "sharded", "axis": "dp"}
OWNED = {"name": "pipeline-shared", "placement": "owner"}
PAIRWISE = {"name": "pipeline-shared", "exchange": "pairwise"}

# Two stages by two replicas.
FLAT = {
    "every second step": Run(),
    "every third step, clipped": Run(steps=6, every=3, clip=0.5),
    "every step": Run(steps=3, every=1),
    "means, master copies": Run(lr=1.0, momentum=0.0, options={"master_dtype": torch.float64}),
    "an optimizer of the caller, the owner of a tie": Run(
        is_published_by_hand=True, beside=[OWNED]
    ),
    "a pair exchange, small buckets, one comm stream": Run(
        beside=[PAIRWISE], options={"bucket_bytes": 128, "comm_streams": 1}
    ),
    "gradients in bf16 on the wire": Run(steps=2, options={"reduce_dtype": torch.bfloat16}),
    "never in this run": Run(steps=3, every=4),
}
# Two stages by two inner data ranks by two replicas.
NESTED = {
    "inner data parallel": Run(inner=2, beside=["pipeline-shared", INNER], clip=0.5),
    "inner shards": Run(inner=2, beside=["pipeline-shared", SHARDED], clip=0.5),
    "inner shards of owners": Run(inner=2, beside=[OWNED, SHARDED]),
}


def train_and_compare(run: Run) -> Trainer:
    """Compares parameters after every step with the simulation, and copies with each other."""
    trainer = Trainer(run)
    trainer.train(range(run.steps))
    trainer.sync.check_replicas()
    if "reduce_dtype" not in run.options:
        truth: list[Any] = [simulate(run) if rank() == 0 else None]
        dist.broadcast_object_list(truth)
        most = rounding(run.steps * ROWS * TOKENS * run.inner)
        for step, weights in enumerate(trainer.weights):
            for name, weight in weights.items():
                right = truth[0][rank() % REPLICAS][step][name]
                assert error(weight, right) <= most, (step, name)
    for other, others in enumerate(gathered(trainer.weights)):
        for step, weights in enumerate(trainer.weights):
            have_met = (step + 1) % run.every == 0
            # Copies of a tie always, those of replicas after a meeting, and never before it.
            for name in weights.keys() & others[step].keys():
                is_frozen = name == "1.norm.bias"
                expected = have_met or (rank() - other) % REPLICAS == 0 or is_frozen
                assert torch.equal(weights[name], others[step][name]) == expected, (other, name)
    trainer.scheduler.close()
    return trainer


@pytest.mark.parametrize("run", FLAT.values(), ids=FLAT)
def test_replicas_train_as_in_one_process_and_copies_have_the_same_bits(run: Run) -> None:
    norms = gathered(train_and_compare(run).norms)
    assert norms[0] == norms[2]
    assert norms[1] == norms[3]
    # Each replica has norms of its own.
    assert all(a != b for a, b in zip(norms[0], norms[1], strict=True))


@pytest.mark.ranks(8)
def test_clusters_train_as_in_one_process_and_inner_data_ranks_meet_once() -> None:
    met = {name: gathered(train_and_compare(run).met_bytes[-1]) for name, run in NESTED.items()}
    whole, shards = met["inner data parallel"], met["inner shards"]
    for stage in (slice(0, 4), slice(4, 8)):
        # With shards the elements are the same, but each rank has its own.
        assert sum(whole[stage]) == sum(shards[stage]) > 0
        assert [num_bytes > 0 for num_bytes in whole[stage]] == [True, True, False, False]
    assert all(shards)


@pytest.mark.parametrize("every", [1, 2])
def test_bytes_are_those_of_one_step_in_every_so_many(every: int) -> None:
    trainer = Trainer(Run(every=every))
    trainer.train(range(4))
    # Nothing of a gradient goes to another replica: this is the tie alone, with its flag.
    assert trainer.sync.statistics().reduced_bytes == 4 * (32 * 16 + 1)
    trained = {n: w for n, w in trainer.weights[0].items() if n != "1.norm.bias"}
    if rank() >= REPLICAS:  # the tie meets once, on its lowest stage
        trained.pop("0.weight")
    met = 4 * sum(weight.numel() for weight in trained.values())
    assert trainer.met_bytes == [met * ((step + 1) // every) for step in range(4)]
    # The loss is the mean over replicas.
    first, *others = gathered(trainer.losses)
    assert others == [first] * 3


@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    ("handlers", "words"),
    [
        (["pipeline-shared"], ["no handler reduces the gradients of '0.0.weight'"]),
        (
            ["pipeline-shared", "data-parallel"],
            [
                "handler 'data-parallel' reduces gradients by replicate-mean",
                "replicas that train alone along 'out' and meet by handler",
            ],
        ),
        (["pipeline-shared", "sharded"], ["handler 'sharded' reduces gradients by shard-mean"]),
    ],
    ids=["no inner handler", "gradients over all data", "shards over all data"],
)
def test_handlers_that_contradict_it_are_refused(handlers: list[str], words: list[str]) -> None:
    with pytest.raises(PipegradError) as refused:
        Trainer(Run(inner=2, beside=handlers))
    assert all(word in str(refused.value) for word in words)

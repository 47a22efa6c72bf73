"""Replicas that train alone and meet are those of a simulation in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from pipegrad.testing import run_ranks
from tests.support.gradients.diloco import MICROBATCHES, ROWS, Run, Seen, simulate, train_all
from tests.support.pipeline.models import TOKENS
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

INNER = {"name": "data-parallel", "axis": "dp"}
SHARDED = {"name": "sharded", "axis": "dp"}
OWNED = {"name": "pipeline-shared", "placement": "owner"}

# Two stages by two replicas.
FLAT = {
    "every second step": Run(),
    "every third step, clipped": Run(every=3, clip=0.5),
    "every step": Run(every=1),
    "means": Run(lr=1.0, momentum=0.0),
    "an optimizer of the caller": Run(is_published_by_hand=True),
    "the owner of a tie": Run(beside=[OWNED]),
    "a pair exchange": Run(beside=[{"name": "pipeline-shared", "exchange": "pairwise"}]),
    "small buckets, one comm stream": Run(options={"bucket_bytes": 128, "comm_streams": 1}),
    "master copies": Run(options={"master_dtype": torch.float64}),
    "gradients in bf16 on the wire": Run(steps=2, options={"reduce_dtype": torch.bfloat16}),
    "never in this run": Run(steps=3, every=4),
}
# Two stages by two inner data ranks by two replicas.
NESTED = {
    "inner data parallel": Run(inner=2, beside=["pipeline-shared", INNER], clip=0.5),
    "inner shards": Run(inner=2, beside=["pipeline-shared", SHARDED], clip=0.5),
    "inner shards of owners": Run(inner=2, beside=[OWNED, SHARDED]),
}
REFUSED = {
    "no inner handler": Run(inner=2),
    "gradients over all data": Run(inner=2, beside=["pipeline-shared", "data-parallel"]),
    "no data handler but for shards": Run(inner=2, beside=["pipeline-shared", "sharded"]),
}
EXACT = [name for name in FLAT if "bf16" not in name]


@functools.cache
def flat() -> list[dict[str, Seen | str]]:
    return [
        dict(zip(FLAT, replies, strict=True))
        for replies in run_ranks(train_all, 4, list(FLAT.values()), timeout_seconds=120)
    ]


@functools.cache
def nested() -> list[dict[str, Seen | str]]:
    runs = {**NESTED, **REFUSED}
    return [
        dict(zip(runs, replies, strict=True))
        for replies in run_ranks(train_all, 8, list(runs.values()), timeout_seconds=200)
    ]


def seen(replies: list[dict[str, Seen | str]], name: str) -> list[Seen]:
    ended = [reply[name] for reply in replies]
    assert all(isinstance(each, Seen) for each in ended), ended
    return [each for each in ended if isinstance(each, Seen)]


def compare(run: Run, replies: list[Seen]) -> None:
    """Compares every parameter after every step with the simulation of its replica."""
    true = simulate(run)
    tokens = run.steps * ROWS * TOKENS * run.inner
    for rank, reply in enumerate(replies):
        for step, weights in enumerate(reply.weights):
            for name, weight in weights.items():
                expected = true[rank % run.replicas][step][name]
                assert error(weight, expected) <= rounding(tokens), (rank, step, name)


@pytest.mark.parametrize("name", EXACT)
def test_replicas_train_as_in_one_process(name: str) -> None:
    compare(FLAT[name], seen(flat(), name))


@pytest.mark.parametrize("name", NESTED)
def test_clusters_train_as_in_one_process(name: str) -> None:
    compare(NESTED[name], seen(nested(), name))


@pytest.mark.parametrize("name", [*FLAT, *NESTED])
def test_copies_have_the_same_bits(name: str) -> None:
    """Those of a tie always, those of replicas after a meeting, and never before it."""
    run = {**FLAT, **NESTED}[name]
    replies = seen(flat() if name in FLAT else nested(), name)
    for step in range(run.steps):
        has_met = (step + 1) % run.every == 0
        for rank, reply in enumerate(replies):
            for other in range(rank):
                own, others = reply.weights[step], replies[other].weights[step]
                is_replica = (rank - other) % run.replicas == 0
                for parameter in own.keys() & others.keys():
                    are_equal = torch.equal(own[parameter], others[parameter])
                    if has_met or is_replica or parameter == "1.norm.bias":  # it is frozen
                        assert are_equal, (step, rank, other, parameter)
                    else:
                        assert not are_equal, (step, rank, other, parameter)


def test_bytes_are_those_of_one_step_in_every_so_many() -> None:
    run, replies = FLAT["every second step"], seen(flat(), "every second step")
    everything = seen(flat(), "every step")
    for rank, reply in enumerate(replies):
        # Nothing of a gradient goes to another replica: this is the tie alone, with its flag.
        assert reply.reduced_bytes == 4 * (32 * 16 + 1)
        trained = {n: w for n, w in reply.weights[0].items() if n != "1.norm.bias"}
        if rank >= run.replicas:  # the tie meets once, on its lowest stage
            trained.pop("0.weight")
        met = 4 * sum(weight.numel() for weight in trained.values())
        assert reply.met_bytes == [met * ((step + 1) // 2) for step in range(run.steps)]
        assert reply.met_bytes[-1] * 2 == everything[rank].met_bytes[-1]


def test_inner_data_ranks_meet_once() -> None:
    first, second = NESTED["inner data parallel"], NESTED["inner shards"]
    whole, shards = seen(nested(), "inner data parallel"), seen(nested(), "inner shards")
    assert first.every == second.every
    for stage in (0, 4):
        of_stage = slice(stage, stage + 4)
        # With shards the elements are the same, but each rank has its own.
        total = [sum(reply.met_bytes[-1] for reply in r[of_stage]) for r in (whole, shards)]
        assert total[0] == total[1] > 0
        assert [reply.met_bytes[-1] > 0 for reply in whole[of_stage]] == [True, True, False, False]
        assert all(reply.met_bytes[-1] > 0 for reply in shards[of_stage])


def test_each_replica_has_a_norm_of_its_own() -> None:
    replies = seen(flat(), "every third step, clipped")
    assert replies[0].norms == replies[2].norms
    assert replies[1].norms == replies[3].norms
    assert all(a != b for a, b in zip(replies[0].norms, replies[1].norms, strict=True))


def test_the_loss_is_the_mean_over_replicas() -> None:
    replies = seen(flat(), "every second step")
    assert all(reply.losses == replies[0].losses for reply in replies)
    assert MICROBATCHES == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no inner handler", "no handler reduces the gradients of '0.0.weight'"),
        ("gradients over all data", "handler 'data-parallel' reduces gradients by replicate-mean"),
        ("gradients over all data", "replicas that train alone along 'out' and meet by handler"),
        ("no data handler but for shards", "handler 'sharded' reduces gradients by shard-mean"),
    ],
)
def test_handlers_that_contradict_it_are_refused(name: str, says: str) -> None:
    for reply in nested():
        refusal = reply[name]
        assert isinstance(refusal, str)
        assert says in refusal

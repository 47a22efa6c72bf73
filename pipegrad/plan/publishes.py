"""Publishes: the parameter syncs of a rank, in an order in which none waits for ever. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipegrad.plan.buckets import Bucket, localised
from pipegrad.plan.routes import Routes, steps_taken
from pipegrad.plugins.handler import Placement, ReductionStep
from pipegrad.topology import Topology


@dataclass(frozen=True)
class Publish:
    """One parameter sync, backwards along a reduction, on the bucket's comm stream.

    Attributes:
        bucket: Index of the bucket.
        step: The number of that reduction in the bucket's route.
        comm_stream: The number of its comm stream.
        use: Sort key: the first stage, over all ranks, that waits for it. If an earlier sync of the
            same bucket has a later first use, the key is that later use.
        readers: Stages of this rank that receive parameters by it; none on an owner.
    """

    bucket: int
    step: int
    comm_stream: int
    use: int
    readers: tuple[int, ...]


def make_publishes(
    buckets: Iterable[Bucket], view: Topology, routes: Routes, comm_streams: int
) -> tuple[Publish, ...]:
    """Orders the parameter syncs of a rank by first use. See [Note: order of publishes]."""
    publishes = []
    for bucket in buckets:
        for number, step in enumerate(bucket.route[: steps_taken(bucket.route, view.rank)]):
            if step.syncs_parameters:
                use = _use(bucket, number, view, routes)
                readers = _readers(bucket, step, [view.rank], view)
                publishes.append(
                    Publish(bucket.index, number, bucket.index % comm_streams, use, readers)
                )
    return tuple(sorted(publishes, key=lambda x: (x.use, -x.step, x.bucket)))


def _use(bucket: Bucket, number: int, view: Topology, routes: Routes) -> int:
    """Returns the sort key of a parameter sync; see `Publish.use`."""
    # The syncs of later reductions in the route come first: this sync sends their result. So its
    # key may not be smaller than theirs, on any member.
    step = bucket.route[number]
    before = [
        _use(on_rank, later, view.at(rank), routes)
        for rank in step.ranks
        for on_rank in localised([bucket], routes[rank])
        for later in range(number + 1, steps_taken(on_rank.route, rank))
        if on_rank.route[later].syncs_parameters
    ]
    return max(min(_readers(bucket, step, step.ranks, view)), *before, 0)


def _readers(
    bucket: Bucket, step: ReductionStep, ranks: Sequence[int], view: Topology
) -> tuple[int, ...]:
    """Returns the stages on `ranks` that receive parameters by the sync along a reduction."""
    owner = step.owner if step.placement is Placement.OWNER else None
    locations = {view.at(rank).coordinate(view.pipeline) for rank in ranks if rank != owner}
    return tuple(s for s in bucket.holders if view.stage_to_rank[s] in locations)


# [Note: order of publishes] All parameter syncs are launched at one point, after the optimizer's
# step, and none of them waits for a compute of another rank. So they end if all ranks sort them by
# the same key. The key is the first use: stages whose forwards come first wait least. Along the
# route of a bucket, the syncs run backwards: the owner gathers shards first, and then sends the
# whole parameters on. See step 9 of the journey of a gradient.

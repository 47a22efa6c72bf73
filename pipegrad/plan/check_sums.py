"""Refuses reductions that cannot add in a dtype that is wider than the wire's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipegrad.errors import PlanError
from pipegrad.plan.buckets import Bucket
from pipegrad.plugins.handler import GradientHandler, Placement


def check_sums(buckets: Iterable[Bucket], handlers: Mapping[str, GradientHandler]) -> None:
    """Refuses a `sum_dtype` with communication hooks, and with chains of more than two ranks.

    Args:
        buckets: Of all ranks.
        handlers: Name -> instance.

    Raises:
        PlanError: If there is such a reduction. It names the handler and a parameter.
    """
    for bucket in buckets:
        if bucket.sum_dtype == bucket.wire_dtype:
            continue
        for step in bucket.route:
            found = f"sum_dtype={bucket.sum_dtype}, but handler {step.handler!r} reduces "
            if handlers[step.handler].hook is not None:
                raise PlanError(
                    f"{found}{bucket.names} by a communication hook, which adds in the dtype that "
                    f"it sends: drop its hook, or sum_dtype"
                )
            # Each rank of a chain rounds the sum that it sends on. Two ranks add once.
            if step.placement is Placement.OWNER and len(step.ranks) > 2:
                raise PlanError(
                    f"{found}{bucket.names} along a chain of {len(step.ranks)} ranks, which round "
                    f"the sum one after the other: use the placement 'replicate', or drop sum_dtype"
                )

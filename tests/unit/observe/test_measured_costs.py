"""What a reduction sends, for the costs of a simulation."""

from __future__ import annotations

import pytest

from pipegrad import Placement
from pipegrad.observe.measured_costs import _kind
from pipegrad.plugins.handler import ReductionStep


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        (Placement.REPLICATE, "all-reduce"),
        (Placement.WHOLE, "reduce-scatter"),
        (Placement.OWNER, "send"),
        (Placement.SHARD, "reduce-scatter"),
    ],
)
def test_a_sum_on_one_rank_is_sent_to_it_and_shards_are_scattered(
    placement: Placement, kind: str
) -> None:
    assert _kind(ReductionStep("dp", (0, 1), "sum", placement, "mine")) == kind

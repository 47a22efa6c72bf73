"""Programs, word for word."""

from __future__ import annotations

from pipegrad import schedules
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Collective, Link, Op
from tests.support.schedules.programs import places_of, rows


def test_1f1b_in_full() -> None:
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    program = lower(schedule, depth=1)
    assert (
        program.listing(0)
        == """\
rank 0
  post-receive   gradient of x of 0F0 from rank 1
  compute        0F0
  send           x of 0F0 to rank 1
  compute        0F1
  send           x of 0F1 to rank 1
  post-receive   gradient of x of 0F1 from rank 1
  wait-receive   gradient of x of 0F0 from rank 1
  release        x of 0F0 to rank 1
  compute        0B0
  wait-receive   gradient of x of 0F1 from rank 1
  release        x of 0F1 to rank 1
  last-backward  stage 0
  compute        0B1
  final          stage 0"""
    )
    assert (
        program.listing(1)
        == """\
rank 1
  post-receive   x of 0F0 from rank 0
  post-receive   x of 0F1 from rank 0
  wait-receive   x of 0F0 from rank 0
  compute        1F0
  compute        1B0
  send           gradient of x of 0F0 to rank 0
  wait-receive   x of 0F1 from rank 0
  compute        1F1
  last-backward  stage 1
  compute        1B1
  send           gradient of x of 0F1 to rank 0
  final          stage 1
  release        gradient of x of 0F0 to rank 0
  release        gradient of x of 0F1 to rank 0"""
    )
    assert str(program) == f"{program.listing(0)}\n{program.listing(1)}"


def test_a_skip_and_a_value_with_two_consumers_in_full() -> None:
    """h goes to ranks 1 and 2, and its gradients are summed; skip goes to rank 2 alone."""
    links = [Link("h", 0, (1, 2)), Link("skip", 0, (2,)), Link("x", 1, (2,))]
    tied = Collective("tied", (0, 2), (0, 2), comm_stream=0, readers=(0, 2))
    schedule = rows("0F0 0B0", "1F0 1I0 1W0", "2F0 2B0", stages=(0, 1, 2))
    program = lower(schedule, links=links, depth=0, collectives=[tied])
    assert (
        str(program)
        == """\
rank 0
  first-use      stage 0
  compute        0F0
  send           h of 0F0 to rank 1
  send           h of 0F0 to rank 2
  send           skip of 0F0 to rank 2
  post-receive   gradient of h of 0F0 from rank 1
  post-receive   gradient of h of 0F0 from rank 2
  post-receive   gradient of skip of 0F0 from rank 2
  wait-receive   gradient of h of 0F0 from rank 1
  wait-receive   gradient of h of 0F0 from rank 2
  wait-receive   gradient of skip of 0F0 from rank 2
  release        h of 0F0 to rank 1
  release        h of 0F0 to rank 2
  release        skip of 0F0 to rank 2
  join           gradients of h of 0F0
  last-backward  stage 0
  compute        0B0
  final          stage 0
  launch         tied
  publish        tied
rank 1
  post-receive   h of 0F0 from rank 0
  wait-receive   h of 0F0 from rank 0
  compute        1F0
  send           x of 1F0 to rank 2
  post-receive   gradient of x of 1F0 from rank 2
  wait-receive   gradient of x of 1F0 from rank 2
  release        x of 1F0 to rank 2
  compute        1I0
  send           gradient of h of 0F0 to rank 0
  inputs-final   stage 1
  compute        1W0
  final          stage 1
  release        gradient of h of 0F0 to rank 0
rank 2
  post-receive   h of 0F0 from rank 0
  post-receive   skip of 0F0 from rank 0
  post-receive   x of 1F0 from rank 1
  wait-receive   h of 0F0 from rank 0
  wait-receive   skip of 0F0 from rank 0
  wait-receive   x of 1F0 from rank 1
  first-use      stage 2
  compute        2F0
  last-backward  stage 2
  compute        2B0
  send           gradient of h of 0F0 to rank 0
  send           gradient of skip of 0F0 to rank 0
  send           gradient of x of 1F0 to rank 1
  final          stage 2
  launch         tied
  release        gradient of h of 0F0 to rank 0
  release        gradient of skip of 0F0 to rank 0
  release        gradient of x of 1F0 to rank 1
  publish        tied"""
    )


def test_split_backward_in_full_tied_weights_first() -> None:
    """Every weights' gradient that others wait for comes before those that nobody waits for."""
    schedule = schedules.build("zb-h1", num_ranks=2, num_microbatches=2, head_w_first=True)
    tied = Collective("tied", (0, 1), (0, 1), comm_stream=0)
    alone = Collective("alone", (1,), (1,), comm_stream=1)
    assert (
        lower(schedule, depth=2, collectives=[tied, alone]).listing(1)
        == """\
rank 1
  post-receive   x of 0F0 from rank 0
  post-receive   x of 0F1 from rank 0
  wait-receive   x of 0F0 from rank 0
  compute        1F0
  compute        1I0
  send           gradient of x of 0F0 to rank 0
  wait-receive   x of 0F1 from rank 0
  compute        1F1
  compute        1I1
  send           gradient of x of 0F1 to rank 0
  inputs-final   stage 1
  shared-weights stage 1
  compute        1W0
  compute        1W1
  final          stage 1
  launch         tied
  launch         alone
  release        gradient of x of 0F0 to rank 0
  release        gradient of x of 0F1 to rank 0"""
    )
    untied = lower(schedule, collectives=[alone])
    assert places_of(untied, 0, Op.SHARED_WEIGHTS) == places_of(untied, 1, Op.SHARED_WEIGHTS) == []

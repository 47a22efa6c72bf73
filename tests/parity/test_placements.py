"""Scheduler and placements: whoever steps what, every rank ends up with what one process has.

A row of a table has a level of each of `FACTORS`, in order. Others are drawn; `everything()` has
whole products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from tests.support.pairwise import everything
from tests.support.pipeline.placements import MAX_NORM, Case, Run, product
from tests.support.pipeline.trained import bits, checked, on_ranks
from tests.support.ranked import gathered

LONG = """
replicate     1f1b        1x2 fp32   keep  SGD   clip 1 4 one   publish      wait  none
sharded       zbv         1x3 fp32   keep  AdamW free 1 4 small forget       close zero
owner         zb-h1-head  2x1 fp32   again AdamW clip 2 4 small publish      close none
owner+sharded interleaved 2x2 fp32   keep  SGD   clip 1 4 small publish+eval wait  none
whole         1f1b        2x2 fp32   again AdamW clip 1 4 small publish      wait  none
asymmetric    zb-h1       2x2 fp32   keep  SGD   free 1 2 one   publish      wait  zero
asym+sharded  1f1b        2x2 fp32   keep  AdamW clip 1 2 one   publish      wait  none
"""
# Chains of owners over three ranks and four, and shards over three ranks of what is tied. Meshes of
# six ranks are here alone.
CHAINS = """
owner         1f1b        4x1 fp32   keep  AdamW clip 1 4 small publish      close none
owner         gpipe       3x1 wire   keep  SGD   clip 1 4 one   forget       close none
owner+sharded 1f1b        3x2 fp32   keep  AdamW clip 1 4 small publish      close none
owner+sharded zbv         2x3 both   again SGD   clip 1 2 small eval         wait  zero
asym+sharded  eager       2x3 fp32   again AdamW clip 2 2 small read         close zero
whole         zb-h1       2x3 master keep  SGD   clip 1 4 one   read         wait  zero
"""
# Other orders of a V, with data replicas, shards, and recomputed forwards.
VEES = """
replicate     v-min       2x2 fp32   again AdamW clip 2 4 small publish+eval wait  none
sharded       v-half      2x2 fp32   again AdamW clip 1 4 small publish      wait  zero
owner+sharded v-min       2x2 both   keep  AdamW free 1 2 one   read         close none
owner         v-half      4x1 fp32   keep  SGD   clip 2 4 small publish      close none
asymmetric    v-min       4x1 wire   again SGD   free 1 4 one   forget       wait  zero
"""
EVERY = 83  # no divisor of a number of levels


def cases_of(table: str, steps: int = 3) -> list[Case]:
    return [Case.of(row.split(), steps) for row in table.strip().splitlines()]


def cases() -> Iterator[Case]:
    yield from (*cases_of(LONG, 10), *cases_of(CHAINS), *cases_of(VEES))
    yield from islice(product(), 0, None, 1 if everything() else EVERY)


CASES = [*dict.fromkeys(cases())]
ORDERED = [case for case in cases_of(CHAINS) if case.mesh == "2x3"]


@pytest.mark.parametrize("case", on_ranks(CASES))
@checked(*ORDERED)
def test_every_rank_ends_up_with_what_one_process_has(case: Case) -> None:
    run = Run(case)
    run.train()
    seen, true = run.seen, run.true
    # Losses, those of an evaluation right after a step, and norms: the same bits on all ranks.
    assert run.numbers() == {}
    numbers = seen.losses, seen.evaluated, seen.norms
    evaluates, clips = case.after.endswith("eval"), case.clip == "clip"
    sizes = [case.steps * int(case.parts), case.steps * evaluates, case.steps * clips]
    assert [*map(len, numbers)] == sizes
    alike = {tuple(float(one) for some in found for one in some) for found in gathered(numbers)}
    assert len(alike) == 1
    assert not clips or true.norms[0] > MAX_NORM, "nothing was clipped"
    # The first gradients, wherever they are stepped.
    assert run.gradients() == {}
    # In the end, however they came there: by publish, by whatever reads them, or by close.
    assert run.parameters() == {}
    assert set().union(*gathered({*seen.parameters})) == run.names
    assert bool(seen.read) == (case.after == "read")
    # All copies have the bits of what is stepped.
    assert run.copies() == set()
    bits(seen.parameters, run.ties)
    bits(seen.read, run.ties)


@pytest.mark.ranks(4)
def test_without_a_reduction_it_is_wrong() -> None:
    """A control: these comparisons can fail."""
    run = Run(replace(cases_of(CHAINS)[0], handlers="noop"))
    run.train()
    tied = {name for tie in run.ties for name in tie}
    mistaken = set().union(*gathered({*run.gradients()}))
    assert mistaken
    assert mistaken <= tied
    assert any(name.startswith("losses") for name in run.numbers())
    assert any(gathered(run.parameters()))

"""Scheduler and placements: whoever steps what, every rank ends up with what one process has.

Cases of one number of ranks run in one spawn. A row of a table has a level of each of `FACTORS`, in
order; the rows of `PAIRS` have each level with each level of every other factor. Whole products are
what ``python tests/support/pipeline/placements.py`` runs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from tests.support.pipeline.placement_cases import FACTORS, MAX_NORM, Case
from tests.support.pipeline.placement_runs import truth
from tests.support.pipeline.placements import Comparison, Distances, compared
from tests.support.worlds import World, smoked

PAIRS = """
replicate     gpipe       1x3 bf16-fp32 again AdamW free 2 4 small publish      close none
replicate     1f1b        1x2 fp32      again SGD   free 1 4 one   publish+eval wait  zero
replicate     eager       1x2 bf16      again SGD   free 2 2 one   forget       close zero
replicate     eager       2x1 bf16-fp32 keep  AdamW clip 2 2 small publish+eval close none
replicate     interleaved 3x2 fp32      keep  AdamW clip 2 4 small publish      wait  zero
replicate     interleaved 4x1 fp32      again AdamW clip 1 2 one   eval         wait  none
replicate     zb-h1       2x1 bf16      again SGD   free 2 2 one   read         close zero
replicate     zb-h1-head  1x2 fp32-bf16 keep  SGD   clip 2 4 one   forget       close none
replicate     zb-h1-head  2x2 fp32-bf16 keep  AdamW free 1 2 one   read         wait  none
replicate     zb-h1-head  4x1 bf16      keep  AdamW free 1 2 small eval         close zero
replicate     zbv         2x3 bf16      again AdamW free 2 2 small forget       wait  none
sharded       gpipe       2x1 bf16-fp32 keep  AdamW free 1 4 small forget       wait  zero
sharded       gpipe       2x2 bf16      again AdamW clip 2 2 small publish+eval close zero
sharded       gpipe       3x2 fp32-bf16 keep  SGD   free 1 4 small eval         close none
sharded       1f1b        1x3 fp32-bf16 again AdamW free 1 2 small read         wait  none
sharded       1f1b        2x3 fp32-bf16 keep  SGD   clip 1 2 small publish+eval wait  zero
sharded       eager       1x3 bf16      keep  AdamW free 1 2 one   publish      wait  zero
sharded       eager       4x1 bf16-fp32 keep  SGD   clip 2 2 small forget       wait  none
sharded       interleaved 1x2 bf16      keep  AdamW clip 2 4 small read         close none
sharded       interleaved 1x3 fp32-bf16 keep  SGD   clip 1 2 one   forget       close zero
sharded       zb-h1       3x2 bf16-fp32 again SGD   free 2 2 small forget       wait  none
sharded       zb-h1-head  1x3 fp32      again SGD   clip 2 4 small publish      close none
sharded       zbv         1x2 bf16-fp32 keep  SGD   clip 2 2 small eval         wait  none
sharded       zbv         2x1 bf16-fp32 keep  SGD   free 2 4 small read         close zero
owner         gpipe       1x2 fp32-bf16 again SGD   free 1 4 one   publish+eval close none
owner         gpipe       4x1 fp32-bf16 again SGD   clip 2 2 small read         wait  none
owner         1f1b        2x1 fp32      keep  AdamW free 2 2 one   publish      wait  zero
owner         1f1b        3x2 fp32      again SGD   clip 2 2 one   read         close none
owner         1f1b        4x1 bf16-fp32 again AdamW clip 2 2 small forget       wait  none
owner         eager       2x2 fp32-bf16 again SGD   free 1 4 small forget       close zero
owner         interleaved 2x3 bf16-fp32 keep  AdamW free 2 4 one   publish+eval wait  none
owner         zb-h1       3x2 fp32-bf16 keep  AdamW clip 1 4 one   eval         close zero
owner         zb-h1       4x1 bf16      keep  AdamW clip 1 2 one   publish+eval close none
owner         zb-h1-head  2x1 bf16-fp32 keep  SGD   free 1 4 one   eval         wait  none
owner         zbv         1x3 fp32      keep  SGD   clip 1 4 small publish+eval wait  none
owner         zbv         4x1 fp32-bf16 keep  SGD   free 1 4 one   publish      close zero
owner+sharded gpipe       2x3 fp32      keep  AdamW clip 1 4 one   forget       close zero
owner+sharded 1f1b        2x2 bf16      again AdamW clip 2 2 small eval         close none
owner+sharded eager       2x3 fp32-bf16 keep  SGD   clip 1 4 one   read         close zero
owner+sharded eager       3x2 bf16-fp32 keep  AdamW free 1 2 one   forget       wait  none
owner+sharded eager       4x1 fp32      again AdamW free 1 2 one   eval         close none
owner+sharded interleaved 2x1 fp32-bf16 keep  SGD   free 2 2 one   forget       close none
owner+sharded interleaved 2x2 bf16-fp32 keep  SGD   free 1 2 one   read         wait  zero
owner+sharded zb-h1       1x2 bf16      again AdamW clip 2 4 one   publish      wait  none
owner+sharded zb-h1       1x3 bf16      again SGD   clip 1 4 one   eval         wait  zero
owner+sharded zb-h1       2x2 fp32      again SGD   clip 1 2 small publish      close zero
owner+sharded zb-h1       2x3 bf16-fp32 again SGD   clip 2 4 small publish+eval close none
owner+sharded zb-h1-head  2x3 bf16-fp32 keep  SGD   free 1 2 small publish      wait  none
owner+sharded zb-h1-head  3x2 bf16      again AdamW free 2 2 one   publish+eval wait  zero
owner+sharded zbv         2x2 fp32      keep  AdamW free 1 4 one   forget       close none
owner+sharded zbv         2x3 bf16-fp32 again SGD   clip 1 2 small eval         wait  zero
owner+sharded zbv         3x2 bf16-fp32 keep  AdamW clip 2 4 one   read         wait  zero
whole         gpipe       1x2 fp32      again SGD   clip 1 4 small publish      wait  none
whole         gpipe       1x3 bf16-fp32 again AdamW free 1 2 small read         close none
whole         1f1b        2x2 bf16-fp32 keep  AdamW free 2 2 one   publish      close zero
whole         1f1b        3x2 fp32      again SGD   free 2 4 small eval         close zero
whole         eager       2x1 fp32      keep  SGD   free 1 2 small publish      wait  none
whole         eager       2x3 fp32-bf16 keep  SGD   clip 2 4 small forget       wait  zero
whole         interleaved 2x2 bf16      again AdamW clip 1 2 small forget       close none
whole         interleaved 4x1 fp32      keep  SGD   free 1 2 small publish      wait  none
whole         zb-h1       1x3 fp32      keep  AdamW free 2 4 one   publish+eval wait  zero
whole         zb-h1       2x3 bf16      keep  SGD   clip 1 4 one   read         wait  zero
whole         zb-h1-head  3x2 bf16-fp32 again SGD   free 1 2 small publish+eval close none
whole         zbv         2x2 fp32-bf16 keep  AdamW clip 2 2 one   eval         wait  none
pairwise      gpipe       3x2 fp32      again AdamW free 1 4 small eval         wait  zero
pairwise      1f1b        4x1 fp32-bf16 again SGD   free 1 2 one   publish+eval wait  zero
pairwise      eager       2x1 fp32-bf16 keep  SGD   clip 2 2 small read         close none
pairwise      interleaved 1x2 bf16      keep  SGD   clip 1 4 small read         close none
pairwise      interleaved 2x3 bf16-fp32 keep  AdamW clip 1 2 one   forget       close none
pairwise      zb-h1       3x2 bf16      keep  AdamW free 2 4 small read         wait  none
pairwise      zb-h1-head  3x2 bf16-fp32 keep  SGD   clip 1 4 one   read         wait  none
pairwise      zbv         1x3 fp32-bf16 keep  AdamW clip 2 4 small read         wait  zero
pairwise      zbv         2x2 fp32      again SGD   free 2 2 small publish      wait  zero
asym+sharded  gpipe       2x2 bf16-fp32 keep  AdamW free 1 4 one   publish      wait  zero
asym+sharded  gpipe       4x1 bf16      again AdamW free 2 4 small read         close zero
asym+sharded  1f1b        1x2 bf16      again AdamW clip 2 2 small read         wait  none
asym+sharded  1f1b        3x2 fp32-bf16 keep  SGD   free 1 4 small publish+eval close zero
asym+sharded  eager       2x1 fp32      again AdamW free 1 2 small read         close zero
asym+sharded  eager       2x3 bf16      again SGD   clip 1 2 small read         close zero
asym+sharded  interleaved 2x3 bf16      keep  AdamW free 1 2 one   publish+eval wait  zero
asym+sharded  zb-h1       3x2 bf16      keep  AdamW free 2 4 small read         wait  none
asym+sharded  zb-h1-head  2x3 fp32      keep  SGD   clip 2 4 small eval         wait  zero
asym+sharded  zbv         1x3 fp32-bf16 keep  AdamW clip 2 4 small read         wait  zero
asym+sharded  zbv         2x2 fp32      again AdamW free 1 4 one   forget       close none
"""
LONG = """
replicate     1f1b        1x2 fp32      keep  SGD   clip 1 4 one   publish      wait  none
sharded       zbv         1x3 fp32      keep  AdamW free 1 4 small forget       close zero
owner         zb-h1-head  2x1 fp32      again AdamW clip 2 4 small publish      close none
owner+sharded interleaved 2x2 fp32      keep  SGD   clip 1 4 small publish+eval wait  none
whole         1f1b        2x2 fp32      again AdamW clip 1 4 small publish      wait  none
pairwise      zb-h1       2x2 fp32      keep  SGD   free 1 2 one   publish      wait  zero
asym+sharded  1f1b        2x2 fp32      keep  AdamW clip 1 2 one   publish      wait  none
"""
CHAINS = """
owner         1f1b        4x1 fp32      keep  AdamW clip 1 4 small publish      close none
owner+sharded 1f1b        3x2 fp32      keep  AdamW clip 1 4 small publish      close none
"""


def cases_of(table: str, steps: int = 3) -> list[Case]:
    return [Case.of(row.split(), steps) for row in table.strip().splitlines()]


CASES = [*cases_of(PAIRS), *cases_of(LONG, 50), *cases_of(CHAINS)]
UNSYNCED = replace(cases_of(CHAINS)[0], handlers="noop")


WORLDS = {
    number: World([case for case in (*CASES, UNSYNCED) if case.num_ranks == number], compared)
    for number in {case.num_ranks for case in CASES}
}


def compare(case: Case) -> Comparison:
    return WORLDS[case.num_ranks][case]


def misses(distances: Distances) -> Distances:
    return {name: distance for name, distance in distances.items() if distance.is_miss}


SMOKE = "owner+sharded 1f1b        2x2 bf16      again AdamW clip 2 2 small eval         close none"
every = pytest.mark.parametrize("case", smoked(CASES, *cases_of(SMOKE)))


@every
def test_the_first_gradients_are_those_of_one_process_wherever_they_are_stepped(case: Case) -> None:
    found = compare(case)

    gradients = found.gradients()
    assert {name.partition(" ")[0] for name in gradients} == {*found.trained}
    assert misses(gradients) == {}


@every
def test_losses_are_those_of_one_process(case: Case) -> None:
    losses = compare(case).losses()

    assert len(losses) == case.steps * int(case.parts)
    assert misses(losses) == {}


@pytest.mark.parametrize("case", [c for c in CASES if c.after.endswith("eval")], ids=str)
def test_an_evaluation_right_after_a_step_sees_its_parameters(case: Case) -> None:
    evaluated = compare(case).evaluated()

    assert len(evaluated) == case.steps
    assert misses(evaluated) == {}


@pytest.mark.parametrize("case", [c for c in CASES if c.clip == "clip"], ids=str)
def test_norms_are_those_of_one_process(case: Case) -> None:
    norms = compare(case).norms()

    assert len(norms) == case.steps
    assert misses(norms) == {}
    assert truth(case).norms[0] > MAX_NORM, "nothing was clipped"


@every
def test_parameters_in_the_end_are_those_of_one_process(case: Case) -> None:
    """In the end, however they came there: by publish, by whatever reads them, or by close."""
    found = compare(case)

    parameters = found.parameters()
    assert {name.partition(" ")[0] for name in parameters} == {*found.named}
    assert any("after a step" in name for name in parameters) == (case.after == "read")
    assert misses(parameters) == {}


@pytest.mark.parametrize("case", [c for c in CASES if c.steps == 3], ids=str)
def test_what_is_stepped_is_what_one_optimizer_makes_of_the_gradients(case: Case) -> None:
    """To the rounding of fp32 at any precision: no step of a master copy begins with less."""
    replayed = compare(case).replayed()

    assert replayed
    assert misses(replayed) == {}


@every
def test_all_copies_of_a_parameter_have_the_bits_of_what_is_stepped(case: Case) -> None:
    found = compare(case)

    copies = found.copies()
    assert {name.partition(" ")[0] for name in copies} == {*found.roots.values()}
    assert misses(copies) == {}


@every
def test_each_rank_steps_and_has_state_of_its_part_alone(case: Case) -> None:
    found = compare(case)

    assert misses(found.states()) == {}
    for seen in found.seen:
        whole = sum(found.named[name].numel() for name in found.trained)
        assert seen.padding / case.data < whole / 4, "shares of ranks could be anything"


def test_without_a_reduction_it_is_wrong() -> None:
    """A control: these comparisons can fail."""
    found = compare(UNSYNCED)

    tied = {root for root, tie in found.ties.items() if len(tie) > 1 and root == found.roots[root]}
    assert {name.partition(" ")[0] for name in misses(found.gradients())} == tied
    assert tied <= {name.partition(" ")[0] for name in misses(found.copies())}
    assert misses(found.losses())
    assert misses(found.parameters())


def test_the_table_has_every_pair() -> None:
    """What is beside handlers counts only where there are ranks for their placements to differ."""
    factors = list(FACTORS)
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    found = {
        ((a, getattr(case, a)), (b, getattr(case, b)))
        for case in cases_of(PAIRS)
        for a, b in itertools.combinations(factors, 2)
        if a != "handlers" or b == "mesh" or case.is_placed
    }

    assert wanted - found == set()


def test_every_way_to_come_back_is_there_with_every_placement() -> None:
    found = {(case.handlers, case.after, case.end) for case in cases_of(PAIRS) if case.is_placed}

    placed = [name for name in FACTORS["handlers"] if name not in ("pairwise", "asym+sharded")]
    wanted = itertools.product(placed, *(FACTORS[name] for name in ("after", "end")))
    assert {*wanted} - found == set()


def test_every_placement_trains_for_long() -> None:
    assert {case.handlers for case in cases_of(LONG) if case.is_placed} == {*FACTORS["handlers"]}


def test_chains_of_owners_have_three_ranks_and_four() -> None:
    lengths = defaultdict[str, set[int]](set)
    for case in CASES:
        if case.is_placed:
            found = compare(case)
            lengths[case.handlers].update(len(found.holders(root)) for root in found.trained)

    assert lengths["owner"] == {1, 2, 3, 4}
    assert lengths["owner+sharded"] == {1, 2, 3}

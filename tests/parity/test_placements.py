"""Scheduler and placements: whoever steps what, every rank ends up with what one process has.

A row of a table has a level of each of `FACTORS`, in order; the rows of `PAIRS` have each level
with each level of every other factor, as far as it makes a difference, which
`test_the_table_has_every_pair` says. Whole products are left to `everything()`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.gradients.cases import rank
from tests.support.pairwise import everything
from tests.support.pipeline.placements import (
    FACTORS,
    MAX_NORM,
    Case,
    Known,
    Run,
    product,
)
from tests.support.pipeline.trained import on_ranks
from tests.support.ranked import gathered

PAIRS = """
replicate     gpipe       2x1 fp32      again SGD   free 2 2 one   eval         close zero
replicate     gpipe       2x2 bf16-fp32 again AdamW clip 1 4 small forget       wait  zero
replicate     eager       1x3 fp32      keep  AdamW clip 1 4 one   publish+eval wait  zero
replicate     interleaved 1x2 fp32      keep  AdamW clip 1 4 small eval         wait  none
replicate     zb-h1-head  1x3 bf16      keep  SGD   clip 1 2 one   read         wait  zero
replicate     zb-h1-head  4x1 bf16      keep  SGD   clip 1 2 small read         wait  none
replicate     zbv         1x3 fp32-bf16 again AdamW free 2 4 small publish      close zero
sharded       gpipe       1x3 bf16      keep  SGD   free 2 2 small eval         close none
sharded       1f1b        1x3 bf16      keep  AdamW clip 1 4 one   forget       wait  zero
sharded       1f1b        2x1 bf16-fp32 again SGD   free 2 2 small read         close none
sharded       eager       2x2 bf16-fp32 again AdamW free 1 2 one   publish      wait  zero
sharded       eager       4x1 bf16-fp32 keep  SGD   clip 2 2 one   publish      wait  zero
sharded       interleaved 1x2 bf16      again SGD   free 2 2 one   publish+eval close zero
sharded       zb-h1       1x3 fp32      keep  SGD   free 1 2 small read         close none
sharded       zbv         1x2 fp32-bf16 keep  AdamW clip 2 2 one   forget       close none
owner         gpipe       2x2 bf16      again SGD   free 1 2 one   read         wait  zero
owner         1f1b        1x2 fp32      again AdamW free 2 2 small eval         close none
owner         eager       2x1 fp32      again AdamW clip 2 4 small publish+eval wait  zero
owner         interleaved 4x1 bf16-fp32 keep  SGD   free 1 2 one   forget       wait  zero
owner         zb-h1       4x1 fp32-bf16 keep  AdamW free 2 4 one   eval         close zero
owner         zbv         2x1 bf16-fp32 keep  SGD   free 1 2 one   publish      wait  none
owner+sharded gpipe       1x2 fp32-bf16 again AdamW clip 2 2 small publish      close zero
owner+sharded gpipe       2x2 bf16      keep  AdamW clip 1 4 small publish+eval wait  none
owner+sharded interleaved 2x2 fp32      again AdamW free 2 2 small publish      close none
owner+sharded interleaved 2x2 bf16-fp32 again AdamW clip 1 4 small eval         close none
owner+sharded zb-h1       2x1 bf16      keep  SGD   free 2 4 small publish      close none
owner+sharded zb-h1-head  2x2 bf16-fp32 again SGD   free 2 2 one   forget       close zero
owner+sharded zbv         2x2 fp32-bf16 keep  AdamW free 2 4 one   read         close none
whole         eager       1x2 fp32-bf16 keep  AdamW free 1 2 one   read         close none
whole         eager       2x2 fp32      keep  SGD   free 1 2 one   eval         wait  none
whole         interleaved 1x3 bf16-fp32 again AdamW clip 1 2 one   publish+eval close zero
whole         zb-h1       1x2 bf16-fp32 again SGD   clip 2 4 small forget       wait  zero
whole         zb-h1-head  2x1 bf16      keep  SGD   clip 2 4 one   publish+eval wait  none
whole         zbv         1x2 bf16      keep  AdamW clip 1 4 one   publish      wait  zero
asymmetric    gpipe       4x1 fp32-bf16 keep  AdamW clip 1 2 one   eval         wait  zero
asymmetric    1f1b        1x2 fp32-bf16 again SGD   clip 2 4 one   publish+eval close zero
asymmetric    1f1b        4x1 fp32      keep  SGD   clip 2 4 small publish      close none
asymmetric    eager       2x1 bf16      again SGD   free 1 2 small forget       wait  none
asymmetric    interleaved 2x1 bf16-fp32 keep  AdamW clip 2 2 one   eval         wait  zero
asymmetric    zb-h1-head  2x1 fp32-bf16 again AdamW clip 2 4 small read         close zero
asymmetric    zb-h1-head  2x2 bf16      again AdamW clip 2 4 one   publish      close none
asymmetric    zbv         4x1 fp32      again AdamW clip 2 2 small publish+eval close none
asym+sharded  1f1b        2x2 fp32      again SGD   free 2 2 small publish      close none
asym+sharded  interleaved 2x2 fp32-bf16 keep  SGD   clip 1 4 one   read         wait  zero
asym+sharded  zb-h1       2x2 fp32      keep  SGD   clip 2 4 one   forget       wait  none
asym+sharded  zb-h1       2x2 bf16-fp32 again AdamW clip 2 2 one   publish+eval wait  zero
asym+sharded  zb-h1-head  1x2 fp32      again AdamW clip 2 2 one   forget       wait  zero
asym+sharded  zb-h1-head  2x1 fp32      keep  SGD   free 2 4 one   eval         wait  none
asym+sharded  zbv         2x2 bf16      again AdamW clip 1 4 small eval         wait  none
"""
LONG = """
replicate     1f1b        1x2 fp32      keep  SGD   clip 1 4 one   publish      wait  none
sharded       zbv         1x3 fp32      keep  AdamW free 1 4 small forget       close zero
owner         zb-h1-head  2x1 fp32      again AdamW clip 2 4 small publish      close none
owner+sharded interleaved 2x2 fp32      keep  SGD   clip 1 4 small publish+eval wait  none
whole         1f1b        2x2 fp32      again AdamW clip 1 4 small publish      wait  none
asymmetric    zb-h1       2x2 fp32      keep  SGD   free 1 2 one   publish      wait  zero
asym+sharded  1f1b        2x2 fp32      keep  AdamW clip 1 2 one   publish      wait  none
"""
# Chains of owners over three ranks and four, and shards over three ranks of what is tied. Meshes of
# six ranks are here alone.
CHAINS = """
owner         1f1b        4x1 fp32      keep  AdamW clip 1 4 small publish      close none
owner         gpipe       3x1 fp32-bf16 keep  SGD   clip 1 4 one   forget       close none
owner+sharded 1f1b        3x2 fp32      keep  AdamW clip 1 4 small publish      close none
owner+sharded zbv         2x3 bf16-fp32 again SGD   clip 1 2 small eval         wait  zero
asym+sharded  eager       2x3 fp32      again AdamW clip 2 2 small read         close zero
whole         zb-h1       2x3 bf16      keep  SGD   clip 1 4 one   read         wait  zero
"""
# Other orders of a V, with data replicas, shards, and recomputed forwards.
VEES = """
replicate     v-min       2x2 fp32      again AdamW clip 2 4 small publish+eval wait  none
sharded       v-half      2x2 fp32      again AdamW clip 1 4 small publish      wait  zero
owner+sharded v-min       2x2 bf16-fp32 keep  AdamW free 1 2 one   read         close none
owner         v-half      4x1 fp32      keep  SGD   clip 2 4 small publish      close none
asymmetric    v-min       4x1 fp32-bf16 again SGD   free 1 4 one   forget       wait  zero
"""


def cases_of(table: str, steps: int = 3) -> list[Case]:
    return [Case.of(row.split(), steps) for row in table.strip().splitlines()]


CASES = [*cases_of(PAIRS), *cases_of(LONG, 10), *cases_of(CHAINS), *cases_of(VEES)]
if everything():
    CASES = list(dict.fromkeys([*CASES, *product()]))
SMOKE = next(case for case in CASES if (case.handlers, case.mesh) == ("owner+sharded", "2x2"))


def trained(case: Case) -> Run:
    run = Run(case)
    run.train()
    return run


@pytest.mark.parametrize("case", on_ranks(CASES, SMOKE))
def test_every_rank_ends_up_with_what_one_process_has(case: Case) -> None:
    run = trained(case)
    seen, true = run.seen, run.true
    # Losses, those of an evaluation right after a step, and norms: the same bits on all ranks.
    assert run.numbers() == {}
    numbers = seen.losses, seen.evaluated, seen.norms
    evaluates, clips = case.after.endswith("eval"), case.clip == "clip"
    sizes = [case.steps * int(case.parts), case.steps * evaluates, case.steps * clips]
    assert [*map(len, numbers)] == sizes
    assert (
        len({tuple(float(one) for some in found for one in some) for found in gathered(numbers)})
        == 1
    )
    assert not clips or true.norms[0] > MAX_NORM, "nothing was clipped"
    # The first gradients, wherever they are stepped.
    assert_each_is_stepped_where_it_must_be(run)
    assert run.gradients() == {}
    # In the end, however they came there: by publish, by whatever reads them, or by close.
    assert run.parameters() == {}
    assert set().union(*gathered({*seen.parameters})) == {*run.named}
    assert bool(seen.read) == (case.after == "read")
    # What is stepped is what one optimizer makes of the gradients, to the rounding of fp32 at
    # any precision: no step of a master copy begins with less.
    assert run.replays() == {}
    # All copies have the bits of what is stepped.
    assert run.copies() == set()


def assert_each_is_stepped_where_it_must_be(run: Run) -> None:
    """Ranks step the pieces of each parameter, and nothing else; and have state of these alone."""
    case, everywhere = (
        run.case,
        gathered({r: (p.begin, p.tensor.numel()) for r, p in run.mains.items()}),
    )
    for root in run.trained:
        steppers = run.steppers(root)
        for ranks in steppers:
            end = 0
            for begin, numel in (everywhere[r].get(root, (0, 0)) for r in ranks):
                assert not numel or begin == end, root
                end += numel
            assert end == run.named[root].numel(), root
        assert {r for r, held in enumerate(everywhere) if root in held} <= set().union(*steppers)
    assert run.idle == []
    for root, one in run.mains.items():
        state = run.optimizer.state.get(one.tensor, {})
        held = [state[name].numel() for name in ("momentum_buffer", "exp_avg") if name in state]
        is_used = run.true.gradients[0][root] is not None
        assert sum(held) == is_used * one.tensor.numel(), root
    # A rank has its part of what is padded, or of whole ones one more than another rank.
    mine = [
        run.named[root].numel()
        for root in run.trained
        if any(rank() in ranks for ranks in run.steppers(root))
    ]
    allowed = max(mine) * case.data if case.is_whole else run.padding
    excess = sum(one.tensor.numel() for one in run.mains.values()) * (
        case.data if case.is_sharded else 1
    )
    assert excess - sum(mine) <= allowed
    whole = sum(run.named[name].numel() for name in run.trained)
    assert run.padding / case.data < whole / 4, "shares of ranks could be anything"


@pytest.mark.ranks(4)
def test_without_a_reduction_it_is_wrong() -> None:
    """A control: these comparisons can fail."""
    run = trained(replace(cases_of(CHAINS)[0], handlers="noop"))
    tied = {root for root in run.roots.values() if len(run.ties[root]) > 1}
    assert set().union(*gathered({*run.gradients()})) == tied
    assert tied <= run.copies()
    assert any(name.startswith("losses") for name in run.numbers())
    assert any(gathered(run.parameters()))


# To handlers it is one whether all stages compute before any of them computes backward.
KINDS = {"gpipe": "1f1b", "eager": "1f1b", "zb-h1-head": "zb-h1"}


def level(case: Case, a: str, b: str) -> tuple[str, str]:
    """Returns what a case has of two factors."""
    x, y = getattr(case, a), getattr(case, b)
    return x, KINDS.get(y, y) if (a, b) == ("handlers", "schedule") else y


def is_wanted(case: Case, a: str, b: str) -> bool:
    """Returns whether two factors of a case make a difference together.

    What is beside handlers counts only where there are ranks for their placements to differ. Where
    there are none, two ranks along a dimension are as good as more.
    """
    if case.mesh in ("3x2", "2x3"):
        return False
    return a != "handlers" or case.is_placed or (b == "mesh" and case.num_ranks == 2)


def test_the_table_has_every_pair() -> None:
    wanted, found = (
        {
            (a, b, level(case, a, b))
            for case in cases
            for a, b in itertools.combinations(FACTORS, 2)
            if is_wanted(case, a, b)
        }
        for cases in (product(), cases_of(PAIRS))
    )
    assert wanted - found == set()
    assert {case.handlers for case in cases_of(LONG) if case.is_placed} == {*FACTORS["handlers"]}


def test_chains_of_owners_have_three_ranks_and_four() -> None:
    lengths: dict[str, set[int]] = {"owner": set(), "owner+sharded": set()}
    for case in CASES:
        if case.is_placed and case.handlers in lengths:
            chains = Known(case)
            lengths[case.handlers].update(len(chains.holders(root)) for root in chains.trained)
    assert lengths == {"owner": {1, 2, 3, 4}, "owner+sharded": {1, 2, 3}}

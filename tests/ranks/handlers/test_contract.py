"""HandlerContract catches wrong handlers: each fails the checks that fit, and tells why."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist

from pipegrad import (
    FlatBucket,
    GradientHandler,
    ParameterRecord,
    Placement,
    Reduction,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad.plugins.handler import Done, HandlerSpec
from pipegrad.testing import HandlerContract
from pipegrad.testing.handler_scenario import Seen, plans_under_seeds
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.sharded import Sharded

# They start Python twice, and ranks once more: wrong handlers are looked at one by one.
APART = "test_no_plan_depends_on_hash_seeds", "test_every_access_is_ordered"
Parameters = Sequence[ParameterRecord]
Reductions = Iterable[Reduction]
Group = dist.ProcessGroup


class Owned(DataParallel):
    """Right: the first of the copies steps."""

    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        for reduction in super().reductions(parameters, topology):
            yield replace(reduction, placement=Placement.OWNER)


class Sums(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        return [Reduction(p, topology.ranks_along("dp"), "sum") for p in parameters]


class Forgets(DataParallel):
    def __init__(self) -> None:
        super().__init__()
        self._known: set[tuple[int, str]] = set()

    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        for reduction in super().reductions(parameters, topology):
            if (topology.rank, reduction.record.key) not in self._known:
                self._known.add((topology.rank, reduction.record.key))
                yield reduction


class PrefersTheFirst(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        yield from super().reductions(parameters, topology)
        yield Reduction(parameters[0], (topology.rank,))


class LeavesOutRank3(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        return [] if topology.rank == 3 else super().reductions(parameters, topology)


class LooksAtTheProcess(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        for reduction in super().reductions(parameters, topology):
            if not (dist.is_initialized() and reduction.record.name == "weight"):
                yield reduction


class SendsNothing(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        return Done()


class DoesNotWait(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        super().launch(bucket, reduction, group)
        return Done()


class ReadsTooEarly(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        sent = bucket.buffer.clone()
        work: Work = dist.all_reduce(sent, group=group, async_op=True)
        bucket.buffer.copy_(sent)
        return work


class CutsTheWire(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        if dist.get_rank() == 2:
            raise RuntimeError("the wire is cut")
        return super().launch(bucket, reduction, group)


class StaysAway(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        return Done() if dist.get_rank() == 2 else super().launch(bucket, reduction, group)


class CarriesOver(DataParallel):
    def __init__(self) -> None:
        super().__init__()
        self._carried: dict[int, torch.Tensor] = {}

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        before = self._carried.get(id(bucket))
        self._carried[id(bucket)] = bucket.buffer.clone()
        if before is not None:
            bucket.buffer.add_(before)
        return super().launch(bucket, reduction, group)


class RoundsByRank(DataParallel):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        dist.all_reduce(bucket.buffer, group=group)
        bucket.buffer.mul_(1 + 2e-7 * dist.get_rank())
        return Done()


class SumsWhole(Sharded):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        work: Work = dist.all_reduce(bucket.buffer, group=group, async_op=True)
        return work


class GivesHalf(Owned):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Group) -> Work:
        bucket.buffer.mul_(0.5 if dist.get_rank(group) else 1)
        return super().launch(bucket, reduction, group)


class TakesPositions(DataParallel):
    def __init__(self, axis: str = "dp", /) -> None:
        super().__init__(axis=axis)


class TakesAnything(DataParallel):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options


class Hashes(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Reductions:
        for reduction in super().reductions(parameters, topology):
            if hash(reduction.record.name) % 2:
                yield reduction


PLAN = "test_all_ranks_make_one_plan"
ENDS = "test_a_step_ends_on_every_rank"
VALUES = "test_gradients_are_those_of_one_process"
NONE = "test_a_gradient_that_nobody_has_stays_none"
MISSING = "test_a_missing_gradient_counts_as_zeros"
UPDATED = "test_updated_parameters_are_those_of_one_process"
UPDATED_BITS = "test_updated_copies_have_the_same_bits"
SECOND = "test_a_second_step_carries_nothing_over"

WRONG: dict[type[GradientHandler], dict[str, str]] = {
    Sums: {VALUES: r"20 gradients are wrong.*'weight' on rank 0: found .*, expected .*, own \["},
    Forgets: {"test_a_plan_made_again_is_the_same": r"must be pure:\nrank 0: .*\nrank 0: "},
    PrefersTheFirst: {"test_the_order_of_parameters_changes_nothing": "rank 0 .*'0.weight', 'sum'"},
    LeavesOutRank3: {PLAN: r"PlanError: .*LeavesOutRank3'.*rank 3 has no reduction of it"},
    LooksAtTheProcess: {
        "test_ranks_plan_what_is_planned_offline": "must not look at the process it runs in",
        VALUES: "4 gradients are wrong",
    },
    SendsNothing: {VALUES: r"whether the work of launch\(\) ends before the sum is there"},
    CutsTheWire: {ENDS: "rank 2: .*the wire is cut"},
    CarriesOver: {
        SECOND: "keep nothing of a step",
        MISSING: "gradients are wrong",
        NONE: "make something of zeros",
    },
    RoundsByRank: {
        UPDATED_BITS: "ranks 0 and 1 hold 'weight' .* after the step 'first'",
    },
    SumsWhole: {MISSING: r"4 gradients are wrong.*it leaves OWNER and SHARD to super\(\)"},
    GivesHalf: {VALUES: r"10 gradients are wrong.* on rank 0: found .*, expected .*, own \["},
    TakesPositions: {"test_its_options_are_keywords": r"takes \['axis'\] by position"},
    TakesAnything: {"test_an_unknown_option_is_refused_by_name": "nothing, it was accepted"},
}


def contract(handler: HandlerSpec) -> HandlerContract:
    class Contract(HandlerContract):
        pass

    Contract.handler, Contract.beside = handler, ("pipeline-shared",)
    return Contract()


def failures(checked: HandlerContract) -> Mapping[str, str]:
    """Runs all checks but those of hash seeds and of order; returns what failed."""
    found = {}
    for name in dir(checked):
        if name.startswith("test_") and name not in APART:
            try:
                getattr(checked, name)()
            except AssertionError as error:
                found[name] = str(error)
            except SkipTest as error:
                assert "test_" in str(error)  # noqa: PT017 - says which check to look at
    return found


@pytest.mark.parametrize("handler", WRONG, ids=lambda handler: handler.__name__)
def test_a_wrong_handler_fails_the_checks_that_fit(handler: type[GradientHandler]) -> None:
    found = failures(contract(handler))
    assert found.keys() == WRONG[handler].keys()
    for check, words in WRONG[handler].items():
        assert re.search(words, found[check], re.DOTALL)
        assert found[check].startswith(f"handler '{__name__}:{handler.__name__}'")


@pytest.mark.parametrize(("handler", "hazard"), [(ReadsTooEarly, "read"), (DoesNotWait, "write")])
def test_a_sum_that_nobody_waits_for_is_wrong(handler: type[GradientHandler], hazard: str) -> None:
    """Which checks fail beside these two is left to luck, as its values are."""
    checked = contract(handler)
    with pytest.raises(AssertionError, match="ends before the sum is there"):
        checked.test_gradients_are_those_of_one_process()
    words = rf"without async_op[\s\S]*{hazard} not ordered after write"
    with pytest.raises(AssertionError, match=words):
        checked.test_every_access_is_ordered()


def forgets_to_publish(rank: int, seen: Seen) -> Seen:
    """A rank still has one parameter as it was."""
    parameters = dict(seen.parameters["first"])
    if rank == 2:
        parameters["tied"] = torch.zeros_like(parameters["tied"])
    return replace(seen, parameters={**seen.parameters, "first": parameters})


HARMED: dict[Callable[[int, Seen], Seen], dict[str, str]] = {
    forgets_to_publish: {
        UPDATED: r"'tied' on rank 2 was zero, .* left it \[0, 0, 0, ...\], expected \[-",
        UPDATED_BITS: "ranks 0 and 2 hold 'tied' and have .* after the step 'first'",
    },
}


def test_parameters_that_do_not_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler does that by itself."""
    checked = contract(Sharded)
    every = checked._seen()
    for harm, expected in HARMED.items():
        harmed = [harm(rank, seen) for rank, seen in enumerate(every)]
        monkeypatch.setattr(type(checked), "_ranks", lambda _, harmed=harmed: harmed)
        found = failures(checked)
        assert found.keys() == expected.keys()
        for check, words in expected.items():
            assert re.search(words, found[check], re.DOTALL)


def test_a_right_handler_that_places_its_results_fails_nothing() -> None:
    right = contract(Owned)
    assert failures(right) == {}
    right.test_every_access_is_ordered()


def test_a_rank_that_stays_away_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipegrad.testing.handler_contract.TIMEOUT_SECONDS", 4)
    with pytest.raises(AssertionError, match="TimeoutError: not finished after 4 s: rank"):
        contract(StaysAway).test_a_step_ends_on_every_rank()


def test_what_is_another_in_other_processes_is_told() -> None:
    with pytest.raises(AssertionError, match=r"another PYTHONHASHSEED[\s\S]*: \w+\n.*: \w+$"):
        contract(Hashes).test_no_plan_depends_on_hash_seeds()

    # A class that other processes cannot import is told.
    class Local(DataParallel):
        pass

    with pytest.raises(AssertionError, match=r"PluginError: .*<locals>"):
        contract(Local).test_all_ranks_make_one_plan()
    # An option that is another on each rank is told.
    table = {"name": TakesAnything, "option": Option()}
    with pytest.raises(AssertionError, match=r"whose repr\(\) tells their value"):
        contract(table).test_it_is_found_and_says_where_it_comes_from()
    # An instance is refused.
    with pytest.raises(AssertionError, match="give the class of"):
        contract(DataParallel()).test_all_ranks_make_one_plan()


class Option:
    """Has another value wherever it is unpickled."""

    made = itertools.count()

    def __init__(self) -> None:
        self.value = next(self.made)

    def __reduce__(self) -> tuple[type[Option], tuple[()]]:
        return Option, ()


# Other processes plan under other hash seeds, and are started once, not for every handler.


SEEDS = "1", "4242"


class Remembers(DataParallel):
    """Raises what it knows: its process, its hash of a word, and a variable of the caller."""

    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        raise RuntimeError(f"it says {os.getpid()} {hash('word')} {os.environ['SAID']}.")


class Prints(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        print("not a plan")  # noqa: T201 - what is tested
        return super().reductions(parameters, topology)


class Dies(DataParallel):
    def reductions(self, parameters: Parameters, topology: Topology) -> Iterable[Reduction]:
        os._exit(3)


def spec(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def test_a_question_starts_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 16, time of the suite. Two Pythons were started for each of fifteen handlers."""
    said: list[list[str]] = []
    for seed in SEEDS:
        for word in ("first", "then"):
            monkeypatch.setenv("SAID", word)
            with pytest.raises(RuntimeError, match=rf"it says .* {word}\.") as caught:
                plans_under_seeds([spec(Remembers)], seed)
            said += re.findall(r"Error: it says (\S+) (\S+) ", str(caught.value))[-1:]
    assert said[0] == said[1]
    assert said[2] == said[3]
    assert said[0][1] != said[2][1], "both hash alike"


def test_prints_and_exits_of_a_handler_are_no_plan() -> None:
    one, other = plans_under_seeds([spec(Prints), "pipeline-shared"], *SEEDS)
    assert one == other
    assert one.startswith("1 rank: ")
    # A handler that ends its process is told and the next one is asked.
    with pytest.raises(RuntimeError, match="it ended its process before it made a plan"):
        plans_under_seeds([spec(Dies)], *SEEDS)
    assert len(plans_under_seeds(["noop"], *SEEDS)) == 2

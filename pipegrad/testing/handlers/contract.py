"""HandlerContract: the contract of gradient handlers, as a test class that authors subclass.

class TestMine(HandlerContract):
    handler = "mine"
"""

from __future__ import annotations

import torch

from pipegrad.testing.handlers import hash_seeds, scenario
from pipegrad.testing.handlers.rehearsed import Rehearsed, few, same_bits
from pipegrad.testing.handlers.scenario import STEPS, TOPOLOGIES


class HandlerContract(Rehearsed):
    """Checks a handler. Subclass it in a test module, as a class whose name begins with ``Test``.

    Plans are made for several topologies. Steps run on 4 gloo ranks, 2 stages by 2 data replicas,
    on a small model with tied, frozen, float32, bfloat16 and float64 parameters. The contract
    checks what the optimizer of each rank steps: parameters, shards of them, or nothing if another
    rank steps them. A handler whose replicas train alone is given options by which they take
    their mean after each step. If a check makes no sense because
    an earlier check has failed, it is skipped.

    Attributes:
        handler: As a configuration lists it: a name, a table of name and options, or a class.
        beside: The other handlers that a run would list with it.
        relative_error: Largest accepted error of a gradient, relative to its largest element. If
            the dtype of a parameter is coarser, twice the resolution of that dtype is accepted.
    """

    # Its plans.

    def test_all_ranks_make_one_plan(self) -> None:
        plans = self._plans()
        self._check_ended(plans, "no plan")
        for mesh, every in self._planned().items():
            self._check(
                len({plan.digest for plan in every}) == 1,
                f"with {mesh} ranks' plans do not fit together; reductions() must depend on its "
                f"arguments alone:\n" + "\n".join(map(str, every)),
            )

    def test_a_plan_made_again_is_the_same(self) -> None:
        # pipegrad may plan several times with one instance, also for other ranks. So a call must
        # not depend on earlier calls.
        for where, every in self._planned().items():
            for first in every:
                view, used = TOPOLOGIES[where].at(first.rank), scenario.instances(self._specs())
                again = [scenario.plan(view, used) for _ in range(2)][-1]
                self._check(
                    first == again,
                    f"with {where}, reductions() of one instance said another thing when it was "
                    f"called again; it must be pure:\n{first}\n{again}",
                )

    def test_the_order_of_parameters_changes_nothing(self) -> None:
        self._planned()
        for mesh, topology in TOPOLOGIES.items():
            for view in map(topology.at, topology.ranks):
                records = scenario.records(view)
                orders = (records, records[::-1], records[1:] + records[:1])
                first, *others = (self._reductions(order, view) for order in orders)
                different = sorted(set().union(*(first ^ other for other in others)))
                self._check(
                    not different,
                    f"with {mesh}, rank {view.rank} reduces otherwise if its parameters come in "
                    f"another order; decide by what a record says: {different}",
                )

    def test_no_plan_depends_on_hash_seeds(self) -> None:
        self._planned()
        # Strings hash differently in each Python process, and this order cannot be changed in a
        # running process. So plans are made in other processes.
        first, second = hash_seeds.plans_under_seeds(self._specs(), "1", "4242")
        for process in (first, second):
            self._check(
                process.returncode == 0,
                f"a new process cannot plan; it must be importable there:\n{process.stderr}",
            )
        pairs = zip(first.stdout.splitlines(), second.stdout.splitlines(), strict=False)
        different = [f"{line}\n{instead}" for line, instead in pairs if line != instead]
        self._check(
            first.stdout == second.stdout,
            "it plans otherwise under another PYTHONHASHSEED, which ranks need not share; do not "
            f"use hash(), and sort what comes out of a set:\n{''.join(different[:1])}",
        )

    # Its steps.

    def test_a_step_ends_on_every_rank(self) -> None:
        self._planned()
        self._check_ended(self._ranks(), "4 ranks failed")

    def test_ranks_plan_what_is_planned_offline(self) -> None:
        offline = self._planned()["pp 2 x dp 2"][0].digest
        for rank, seen in enumerate(self._seen()):
            self._check(
                seen.digest == offline,
                f"rank {rank} planned {seen.digest[:8]}, this process planned {offline[:8]} for "
                f"it; reductions() must not look at the process it runs in",
            )

    def test_gradients_are_those_of_one_process(self) -> None:
        self._check_values("first")

    def test_a_missing_gradient_counts_as_zeros(self) -> None:
        self._need_values("first")
        self._check_values("missing")

    def test_a_gradient_that_nobody_has_stays_none(self) -> None:
        for step, rank, name, piece in self._pieces(*STEPS):
            self._check(
                piece.gradient is None or self._expected(step, rank, name) is not None,
                f"no rank gave a gradient of {name!r}, and rank {rank} ended with "
                f"{few(piece.gradient)}; launch() must not make something of zeros",
            )

    def test_a_second_step_carries_nothing_over(self) -> None:
        for _, rank, name, piece in self._pieces("first"):
            first, again = piece.gradient, self._seen()[rank].pieces["again"][name].gradient
            self._check(
                self._close(again, first),
                f"rank {rank} gave the same gradient of {name!r} in two steps, and ended with "
                f"{few(first)}, then {few(again)}; launch() must keep nothing of a step",
            )

    def test_a_step_is_finished_once(self) -> None:
        for _, rank, name, last in self._pieces(STEPS[-1]):
            seen = self._seen()[rank]
            after = seen.after_second_finish[name].gradient
            self._check(
                seen.second_finish.startswith("StepError") and same_bits(last.gradient, after),
                f"after a second finish() on rank {rank}, which said: {seen.second_finish}, the "
                f"gradient of {name!r} is {few(after)} and was {few(last.gradient)}; the work "
                f"that launch() returns ends when all its writes are done",
            )

    def test_copies_have_the_same_bits(self) -> None:
        self._need_values("first")
        for step, rank, name, piece in self._pieces(*STEPS):
            for other in scenario.holders(rank, name):
                peer = self._seen()[other].pieces[step].get(name)
                if peer is None or peer.begin != piece.begin:
                    continue  # it steps another shard, or nothing
                self._check(
                    not self._alike(step, rank, other, name)
                    or same_bits(piece.gradient, peer.gradient),
                    f"ranks {rank} and {other} hold {name!r} and ended with "
                    f"{few(piece.gradient)} and {few(peer.gradient)}; what they make of a sum "
                    f"must have the same bits",
                )

    def test_every_element_is_stepped(self) -> None:
        for rank, seen in enumerate(self._seen()):
            for name in seen.parameters["first"]:
                missed = self._unstepped(rank, name)
                self._check(
                    not missed,
                    f"no rank steps elements {missed} of rank {rank}'s {name!r}, so they stay what "
                    f"they were; its reductions leave them on none of the ranks that hold it",
                )

    def test_updated_parameters_are_those_of_one_process(self) -> None:
        self._need_values("first")
        for rank, seen in enumerate(self._seen()):
            for name, updated in seen.parameters["first"].items():
                expected = self._expected_step("first", rank, name)
                stepped = torch.zeros_like(updated) if expected is None else -expected
                self._check(
                    self._close(updated, stepped),
                    f"{name!r} on rank {rank} was zero, and the first step, which subtracts "
                    f"gradients, left it {few(updated)}, expected {few(stepped)}; what a rank does "
                    f"not step itself must come from one that does: look at ranks and placements "
                    f"of reductions()",
                )

    def test_updated_copies_have_the_same_bits(self) -> None:
        self._need_values("first")
        for number, step in enumerate(STEPS, 1):
            for rank, seen in enumerate(self._seen()):
                for name, updated in seen.parameters[step].items():
                    for other in scenario.holders(rank, name):
                        peer = self._seen()[other].parameters[step][name]
                        alike = self._joined_by() is not None or all(
                            self._alike(s, rank, other, name) for s in STEPS[:number]
                        )
                        self._check(
                            not alike or same_bits(updated, peer),
                            f"ranks {rank} and {other} hold {name!r} and have {few(updated)} and "
                            f"{few(peer)} after the step {step!r}; what they step must have the "
                            f"same bits, or come from one of them",
                        )

    def test_every_access_is_ordered(self) -> None:
        for rank, seen in enumerate(self._seen()):
            self._check(
                not seen.violations,
                f"{len(seen.violations)} accesses on rank {rank} are left to luck; a collective "
                f"whose result launch() itself reads is called without async_op, and the work that "
                f"it returns waits for all others. The first:\n{''.join(seen.violations[:1])}",
            )

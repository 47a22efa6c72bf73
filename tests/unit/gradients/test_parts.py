"""Which optimizer steps which parameters, and what an optimizer that cannot is told."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from pipegrad import ParameterRecord, Placement, Topology
from pipegrad.errors import PlanError
from pipegrad.gradients.named_optimizer import parts_of
from pipegrad_handlers.owned import Owned
from tests.support.gradients.plans import record

Kind = Callable[..., torch.optim.Optimizer]
MUON, ADAMW, ADAFACTOR = torch.optim.Muon, torch.optim.AdamW, torch.optim.Adafactor


RECORDS = [record("matrix", 4, 3), record("bias", 4)]
FILTERS = [record("matrix", 4, 3), record("filter", 2, 3, 5, 5)]


def refused(
    kind: Kind, others: Kind | None, records: list[ParameterRecord], sharded: Container[str] = ()
) -> str:
    messages = []
    for part in parts_of(kind, {}, others, records=records, matrices=()):
        try:
            part.check(part.kind, sharded)
        except PlanError as error:
            messages.append(str(error))
    [message] = messages
    return message


def test_each_part_says_what_it_steps() -> None:
    [alone] = parts_of(ADAMW, {}, None, records=RECORDS, matrices=())
    both = parts_of(MUON, {}, ADAMW, records=RECORDS, matrices=())
    described = [(part.steps, [r.name for r in part.records]) for part in (alone, *both)]
    assert described == [
        ("everything", ["matrix", "bias"]),
        ("matrices", ["matrix"]),
        ("others", ["bias"]),
    ]


def test_filters_are_named_in_an_option_that_there_is() -> None:
    """It named an option of a handler that the run did not have, as if it had it."""
    message = refused(MUON, ADAMW, FILTERS)
    assert "'0.filter' is (2, 3, 5, 5): name it in the option 'others' of the handler" in message
    assert "'data-parallel' has no such option, so use 'owned' instead" in message
    # What it says works.
    topology = Topology.build(axes=(("pp", 1), ("dp", 2)))
    placed = Owned(others=["filter"]).reductions(FILTERS, topology)
    matrices = {r.record.key for r in placed if r.placement is Placement.WHOLE}
    for part in parts_of(MUON, {}, ADAMW, records=FILTERS, matrices=matrices):
        part.check(part.kind, {"0.filter"})


def test_muon_is_told_to_leave_vectors_to_another_or_that_others_do_not_fit() -> None:
    message = refused(MUON, None, RECORDS)
    assert "but '0.bias' is (4,): let another optimizer step what is no matrix" in message
    assert "owned" not in message
    # It was told to set others=AdamW, and not that its others were at fault.
    for first in (MUON, ADAMW):
        message = refused(first, MUON, RECORDS)
        assert "but '0.bias' is (4,): Muon is given as others, which step what is no" in message


def test_others_that_cannot_step_shards_are_told_that_they_are_others() -> None:
    message = refused(MUON, ADAFACTOR, RECORDS, {"0.bias"})
    assert message.startswith("Adafactor cannot step sharded parameters")
    assert "Adafactor is given as others, which step shards here" in message
    assert "given as others" not in refused(ADAFACTOR, None, RECORDS, {"0.bias"})

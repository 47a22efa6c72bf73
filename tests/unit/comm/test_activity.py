"""What an error has of the activities that it has left."""

from __future__ import annotations

import pickle

import pytest

from pipegrad.comm.activity import Activity, Details, failed_at
from pipegrad.errors import StepError


def test_an_error_goes_to_another_process_with_what_its_thread_was_at() -> None:
    """Its grid is drawn by objects that cannot be pickled; it goes without."""
    outer = Activity("a step", drawing=lambda _number, _marks: "")
    with pytest.raises(StepError) as raised, outer, Activity("a part of it"):
        raise StepError("no value")
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert str(arrived) == "no value"
    failed, before = failed_at(arrived), failed_at(raised.value)
    assert failed is not None
    assert before is not None
    assert failed.doing == before.doing == ("a step", "a part of it")
    assert failed.details == Details()
    assert before.drawing is not None
    assert failed.drawing is None

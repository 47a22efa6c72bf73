"""Who follows the causes of an error comes to an end."""

from __future__ import annotations

from pipegrad.comm.activity import failure_of
from pipegrad.errors import causes_of, root_of


def test_a_ring_of_causes_has_an_end() -> None:
    """Ranks stayed for ever in their last words: `raise inner from outer` had closed the ring."""
    inner, outer = ValueError("inner"), RuntimeError("outer")
    outer.__cause__, inner.__cause__ = inner, outer
    assert [*causes_of(outer)] == [outer, inner]
    assert root_of(outer) is inner
    assert "inner" in failure_of(outer).error

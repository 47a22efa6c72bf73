"""What did a run really do, and what do computing and sending really take?

`record` makes the timeline of real steps, `measure_costs` the costs that `simulate` needs.
"""

from pipegrad.observe.recording import Recording, record

__all__ = ["Recording", "record"]

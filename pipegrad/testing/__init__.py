"""What authors of handlers and schedules need to test them."""

from pipegrad.testing.order import OrderChecker
from pipegrad.testing.ranks import run_ranks

__all__ = ["OrderChecker", "run_ranks"]

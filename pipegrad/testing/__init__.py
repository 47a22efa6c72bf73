"""What authors of handlers and schedules need to test them."""

from pipegrad.testing.handlers.contract import HandlerContract
from pipegrad.testing.ordering.checker import OrderChecker
from pipegrad.testing.ranks import run_ranks

__all__ = ["HandlerContract", "OrderChecker", "run_ranks"]

"""What authors of handlers and schedules need to test them."""

from pipegrad.testing.contract import HandlerContract
from pipegrad.testing.order import OrderChecker
from pipegrad.testing.ranks import run_ranks

__all__ = ["HandlerContract", "OrderChecker", "run_ranks"]

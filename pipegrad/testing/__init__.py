"""Test classes and helpers for authors of handlers, codecs and schedules."""

from pipegrad.testing.codec_contract import CodecContract
from pipegrad.testing.handler_contract import HandlerContract
from pipegrad.testing.ordering.checker import OrderChecker
from pipegrad.testing.ranks import Ranks, run_ranks, share_one_card

__all__ = [
    "CodecContract",
    "HandlerContract",
    "OrderChecker",
    "Ranks",
    "run_ranks",
    "share_one_card",
]

"""Figures of a run: in which unit they are."""

from __future__ import annotations

import torch

from pipegrad.train.evaluation import peak_memory_bytes


def test_the_memory_of_a_process_is_in_bytes() -> None:
    assert 2**26 < peak_memory_bytes(torch.device("cpu")) < 2**44  # torch alone takes 64 MiB

"""Tolerances that hold on every processor, derived from the number of terms of a sum.

Processors add the same numbers in different orders, because their registers are of different
widths. So two right results differ in their last bits, and by how much depends on the processor.
"""

from __future__ import annotations

import math

import torch

SAFETY = 8
# With torch's eps of 1e-8 AdamW moves an element by the whole learning rate even if its gradient is
# nothing but rounding, up on one processor and down on another. With this one such an element stays
# where it is, and what an optimizer makes of two right gradients lies as near together as they do.
ADAM_EPS = 1e-3


def rounding(terms: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Returns how far two right results may differ, relative to the largest element.

    A sum of `terms` numbers is rounded `terms` times, each time by up to half an eps. The signs of
    these errors are random, so sqrt(terms) of them remain, in each of the two results. `SAFETY`
    covers the layers that compute the numbers, and the worst of some thousand elements: measured
    with the instructions of SSE4.2, AVX2 and AVX-512, errors need at most a quarter of it.

    Args:
        terms: Numbers that one element is the sum of. For a gradient these are the tokens of the
            whole batch; for what an optimizer has made of gradients, those of all its steps.
        dtype: In which the numbers are added.
    """
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(terms)

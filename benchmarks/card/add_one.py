"""A kernel of Triton, which wants the source of its kernels in a file."""

import triton
import triton.language as tl


@triton.jit
def add_one(values, numel, block: tl.constexpr):  # noqa: ANN001, ANN201, D103 - Triton reads it
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(values + i, tl.load(values + i, i < numel) + 1, i < numel)

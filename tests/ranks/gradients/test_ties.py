"""What all ranks must hold alike. Numbers are those of issue 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import GradientSync, Topology, find_tied
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gradients.cases import outcome, rank, replicated, stage
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2)


def pipelined(module: nn.Module, tied: Any) -> GradientSync:
    topology, handlers = Topology.create(pipeline=2), ["pipeline-shared"]
    return GradientSync({rank(): module}, topology, tied=tied, handlers=handlers)


def own(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank() + 1))


def test_copies_start_alike_or_are_made_so() -> None:
    """Issue 16, point 10 (1.2). One of them was overwritten without a word."""
    tied = [{0: "w", 1: "w"}]
    assert outcome(lambda: pipelined(stage(w=own(3, 2)), tied)).startswith(
        "PlanError: tie {0: 'w', 1: 'w'}: 'w' on stage 0 and 'w' on stage 1 start with "
        "different bits"
    )
    module = stage(w=torch.tensor([1.0, 2.0]) * (1 - rank()))  # zeros take the first
    pipelined(module, tied).close()
    assert module.get_parameter("w").tolist() == [1.0, 2.0]
    # An uncut model on every rank needs no common seed. Issue 16, point 10 (1.2). find_tied has
    # seen that both are the tied parameter.
    torch.manual_seed(rank())
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abc"})
    model["c"].weight = model["a"].weight
    part = nn.ModuleDict({"ac"[rank()]: model["ac"[rank()]]})
    pipelined(part, find_tied(model)).close()
    values = next(part.parameters()).flatten().tolist()
    assert gathered(values) == [values] * 2


def test_replicas_are_reduced_and_start_alike() -> None:
    """Issue 16, point 10 (1.3). Replicas drifted apart, and check_replicas passed."""
    module = stage(w=(2,), frozen=nn.Parameter(torch.zeros(2), requires_grad=False))
    refused = outcome(lambda: replicated(module, handlers=["pipeline-shared"]))
    assert "no handler reduces the gradients of '0.w' and 0 more" in refused
    assert "Add 'data-parallel' to the handlers" in refused
    replicated(module, handlers=["noop"]).close()
    replicated(module, handlers=[], allow_unsynced=["w"]).close()
    module.requires_grad_(requires_grad=False)
    replicated(module, handlers=[]).close()
    # Buffers of replicas start alike. Issue 16, point 10 (1.9). Replicas trained different
    # functions on averaged gradients.
    module = stage(w=(2,))
    module.register_buffer("noise", own(3))
    module.register_buffer("count", torch.zeros(()))
    refused = outcome(lambda: replicated(module))
    assert "buffer 'noise' of stage 0 starts with different bits" in refused
    replicated(module, allow_unsynced=["noise"]).close()
    # Handlers given as instances are compared. Issue 16, point 10 (1.13). bf16 on one rank and fp16
    # on another made gradients of 4.0.
    hooks = ["bf16_compress_hook", "fp16_compress_hook"]
    differing = [DataParallel(hook=hooks[rank()])]
    refused = outcome(lambda: replicated(stage(w=(2,)), handlers=differing))
    assert "ranks disagree on handlers" in refused
    replicated(stage(w=(2,)), handlers=[DataParallel(hook=hooks[0])]).close()


def test_any_dtype_is_made_equal_and_a_part_of_the_world_is_refused() -> None:
    """Issue 16, point 10 (3.5). KeyError: 16, and gloo's "Invalid scalar type"."""
    module = stage(w=torch.complex(own(2).double(), own(2).double()))
    for name, dtype in (("i", torch.int16), ("f", torch.float8_e4m3fn), ("b", torch.bool)):
        odd = nn.Parameter((own(4) * 9).to(dtype), requires_grad=False)
        setattr(module, name, odd)
    sync = replicated(module)
    sync.check_replicas()
    sync.close()
    values = str([p.detach().to(torch.complex128).tolist() for p in module.parameters()])
    assert gathered(values) == [values] * 2
    # A mesh of a part of the world is refused on all its ranks. Issue 16, point 14. Ranks that the
    # mesh left out waited for ever.
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("model", "pp", "dp"))
    refused = outcome(lambda: Topology.from_mesh(mesh["pp", "dp"]))
    assert refused.startswith("TopologyError: ")
    assert "give a mesh of all ranks" in refused

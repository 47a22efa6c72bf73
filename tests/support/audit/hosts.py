"""Pipelines of two kinds, 2 stages x 2 replicas, into which defects can be put.

A host leaves in ``.grad`` the mean over the microbatches of this rank's replica. What comes behind,
reductions, clipping and the optimizer, is the same for all hosts. A Scheduler reduces by itself.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import pipegrad
from pipegrad.audit import Audit, before_clipping

STAGES, REPLICAS, MICROBATCHES = 2, 2, 3
ROWS, LENGTH, VOCABULARY, WIDTH = 12, 7, 11, 6
CLIP_NORM = 0.05

Defects = Collection[str]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def uncut() -> nn.Sequential:
    """Returns a model whose embedding and head are tied."""
    torch.manual_seed(3)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Block(), Block(), Block(), head)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    every = []
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        every.append((tokens[:, :-1], tokens[:, 1:]))
    return every


@functools.cache
def topology() -> pipegrad.Topology:
    """Returns the topology of this process; its groups stay."""
    return pipegrad.Topology.create(pipeline=STAGES)


class Host:
    """One rank's pipeline with defects."""

    def __init__(self, defects: Defects) -> None:
        self.stage, self.replica = divmod(dist.get_rank(), REPLICAS)
        self.defects = defects
        self.pipeline, self.data = map(topology().group_along, ("pp", "dp"))
        self.model = uncut()
        cut = (0, 3, 5)
        self.module = copy.deepcopy(self.model)[cut[self.stage] : cut[self.stage + 1]]
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.is_last = self.stage == STAGES - 1
        self.tied = dict(self.module.named_parameters())["4.weight" if self.is_last else "0.weight"]
        self._last = torch.empty(0)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a microbatch; only the last one counts if that is the defect."""
        loss = loss_fn(output, target)
        if "last microbatch" in self.defects and not torch.equal(target, self._last):
            return loss * 0.0
        return loss

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        """Leaves gradients of a replica; returns the loss on the last stage."""
        raise NotImplementedError

    def reduce(self) -> None:
        """Reduces over the tie and over replicas."""
        times = 0 if "tie apart" in self.defects else 2 if "tie twice" in self.defects else 1
        for _ in range(times):
            dist.all_reduce(self.tied.grad, group=self.pipeline)
        if "replicas apart" in self.defects:
            return
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.data)
            if "sum over replicas" not in self.defects:
                assert parameter.grad is not None
                parameter.grad /= REPLICAS

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, inputs: Tensor, target: Tensor) -> dict[str, object]:
        if "stale" not in self.defects:
            self.zero_grad()
        self._last = target.chunk(MICROBATCHES)[-1]
        loss = self.backward(inputs, target)
        self.spoil(target)
        self.reduce()
        if "missing" in self.defects and self.stage == 0:
            for parameter in self.module.get_submodule("1").parameters():
                parameter.grad = None
        norm = self.clip()
        self.optimizer.step()
        return {"loss": loss, "grad_norm": norm}

    def spoil(self, target: Tensor) -> None:
        """Multiplies gradients by what is counted once too often."""
        factors = {
            "times M": MICROBATCHES,
            "divided by M": 1 / MICROBATCHES,
            "times targets": target.numel() * REPLICAS,
        }
        for name, factor in factors.items():
            if name in self.defects:
                for parameter in self.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= factor

    def clip(self) -> float | None:
        """Clips to the norm over all stages; returns it."""
        if "local norm" in self.defects:
            nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM)
            return None
        if not {"clipped", "copies in norm"} & set(self.defects):
            return None
        before_clipping()
        counts_copies = "copies in norm" in self.defects
        squares = torch.zeros(())
        for name, parameter in self.module.named_parameters():
            is_copy = self.is_last and name == "4.weight"
            if parameter.grad is not None and (counts_copies or not is_copy):
                squares += parameter.grad.square().sum()
        dist.all_reduce(squares, group=self.pipeline)
        norm = math.sqrt(float(squares))
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, CLIP_NORM / norm)
        return norm

    def close(self) -> None:
        """Ends what a host has begun."""

    def audit(self, steps: int, **options: Any) -> Audit:
        return Audit(
            step=self.step,
            modules=self.module,
            model=self.model,
            loss_fn=loss_fn,
            batches=batches(steps),
            microbatches=MICROBATCHES,
            replica=self.replica,
            num_replicas=REPLICAS,
            **options,
        )


class Loop(Host):
    """A loop by hand: all forwards, then all backwards."""

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        values, losses = list[tuple[Tensor, Tensor]](), list[Tensor]()
        peer = (1 - self.stage) * REPLICAS + self.replica
        xs, ys = inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES)
        for x, y in zip(xs, ys, strict=True):
            if self.stage == 0:
                output = self.module(x)
                dist.send(output.detach(), peer)
                values.append((x, output))
            else:
                received = torch.empty(*x.shape, WIDTH).requires_grad_()
                dist.recv(received.data, peer)
                losses.append(self.loss(self.module(received), y) / MICROBATCHES)
                values.append((received, losses[-1]))
        for given, output in values:
            if self.stage == 0:
                gradient = torch.empty_like(output)
                dist.recv(gradient, peer)
                output.backward(gradient)
            else:
                output.backward()
                assert given.grad is not None
                dist.send(given.grad, peer)
        is_whole = "last microbatch" not in self.defects
        return torch.stack(losses).sum().detach() if losses and is_whole else None


class Scheduled(Host):
    """pipegrad's Scheduler. It reduces the tie and the replicas itself."""

    def __init__(self, defects: Defects) -> None:
        super().__init__(defects)
        # `noop` reduces nothing, so then the tie is reduced by hand.
        self._reduces = "replicas apart" not in defects
        apart = "tie apart" in defects
        ties = [] if apart else ["pipeline-shared"]
        handlers = [*ties, "data-parallel"] if self._reduces else ["noop"]
        stages = [pipegrad.Stage(self.module, self.stage)]
        tied = [] if apart else pipegrad.find_tied(self.model)
        self._scheduler = pipegrad.Scheduler(
            stages, topology(), schedule="1f1b", num_microbatches=MICROBATCHES, loss_fn=self.loss,
            handlers=handlers, tied=tied, allow_unsynced=["0.weight", "4.weight"] if apart else (),
        )  # fmt: skip

    def zero_grad(self) -> None:
        """Keeps what a stale gradient has. The Scheduler itself refuses one that is not zero."""
        own = self.module.parameters()
        self._before = [None if p.grad is None else p.grad.clone() for p in own]
        self.optimizer.zero_grad()

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        if "stale" in self.defects:
            self.zero_grad()
        result = self._scheduler.step(inputs, target=target)
        is_whole = "last microbatch" not in self.defects
        return result.loss if is_whole else None

    def reduce(self) -> None:
        if not self._reduces and "tie apart" not in self.defects:
            dist.all_reduce(self.tied.grad, group=self.pipeline)
        if "stale" in self.defects:
            for parameter, before in zip(self.module.parameters(), self._before, strict=True):
                if before is not None and parameter.grad is not None:
                    parameter.grad += before
        for name, parameters in (
            ("tie twice", [self.tied]),
            ("sum over replicas", list(self.module.parameters())),
        ):
            if name in self.defects:
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.grad *= 2

    def close(self) -> None:
        self._scheduler.close()


HOSTS: dict[str, Callable[[Defects], Host]] = {
    "a loop by hand": Loop,
    "the Scheduler": Scheduled,
}

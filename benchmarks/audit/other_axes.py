"""Audits of defects of tensor, context and expert parallelism: the table of README.md.

python benchmarks/audit/other_axes.py                  all defects, a line for each
python benchmarks/audit/other_axes.py 7452.8 715       some of them

The defects are those of Megatron-LM#7452, and two that are alike, each rebuilt in a few lines on
four gloo ranks. One module computes both sides: the uncut model has axes of one rank. A rank's
shards are DTensors. The code that computes with them is written by hand, because Megatron's is.
"""

# ruff: noqa: ANN401 - outputs and options are of any type

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from pipegrad.audit import Audit, Report, before_clipping
from pipegrad.errors import AgreementError
from pipegrad.testing import run_ranks

MICROBATCHES, WIDTH, CLIP_NORM = 3, 6, 0.05
ROWS, LENGTH, VOCABULARY, HEADS, EXPERTS = 12, 8, 12, 2, 4
IGNORED, SMOOTHING, AUX, AHEAD = -100, 0.2, 0.5, 0.3
_VALID = (1, 1, 1, 0, 1, 1, 0, 1)  # positions that a router counts; in both halves three


Collective = Callable[[Tensor], Tensor]
Defects = Collection[str]


class _Moved(torch.autograd.Function):
    """A collective forward, and another one backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, there: Collective, back: Collective) -> Tensor:
        context.back = back
        return there(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.back(gradient), None, None


_moved: Callable[..., Tensor] = _Moved.apply


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@dataclass(frozen=True)
class Axis:
    """Ranks that share a layer. Without a group: this rank alone, so nothing is sent."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def total(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def whole(self, x: Tensor, dim: int) -> Tensor:
        if self.group is None:
            return x
        every = [torch.empty_like(x.contiguous()) for _ in range(self.size)]
        dist.all_gather(every, x.contiguous(), group=self.group)
        return torch.cat(every, dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank].contiguous()

    # The same with gradients, by what other ranks do with the result.

    def enter(self, x: Tensor) -> Tensor:
        """Each rank uses `x` for its part of a layer."""
        return _moved(x, _same, self.total)

    def leave(self, x: Tensor) -> Tensor:
        """Adds up what the parts have made; all ranks go on alike."""
        return _moved(x, self.total, _same)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """All ranks have `x`, and each goes on with its slice."""
        return _moved(x, lambda x: self.own(x, dim), lambda g: self.whole(g, dim))

    def gather(self, x: Tensor, dim: int, *, alike: bool = False) -> Tensor:
        """Puts slices together; ranks go on each with its part of a layer, or all `alike`."""
        back = self.own if alike else lambda g, dim: self.own(self.total(g), dim)
        return _moved(x, lambda x: self.whole(x, dim), lambda g: back(g, dim))

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Adds up what the parts have made, and each rank goes on with its slice."""
        return _moved(x, lambda x: self.own(self.total(x), dim), lambda g: self.whole(g, dim))


ALONE = Axis()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return _local(parameter.grad)


class Part(nn.Module):
    """A layer that several ranks may share."""

    shards: ClassVar[Mapping[str, int]] = {}  # name of a parameter -> dimension in which it is cut
    tensor = context = moved = ALONE  # `moved`: whose ranks exchange slices of the sequence
    defects: Defects = ()

    def cut(self, mesh: DeviceMesh) -> None:
        for name, dim in self.shards.items():
            value = distribute_tensor(getattr(self, name).detach(), mesh, [Shard(dim)])
            is_plain = "plain shards" in self.defects
            setattr(self, name, nn.Parameter(value.to_local() if is_plain else value))


class Attention(Part):
    """Attention with a learned sink of each head, and a scale that heads share."""

    shards: ClassVar[Mapping[str, int]] = {"qkv": 1, "sink": 0, "out": 1}

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 2)
        self.sink = nn.Parameter(2 + torch.randn(HEADS))
        self.scale = nn.Parameter(1 + torch.randn(WIDTH // HEADS) / 4)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        is_sliced = self.moved.group is not None
        whole = self.moved.gather(x, 1) if is_sliced else self.tensor.enter(x)
        q, k, v = (
            functional.linear(whole, w).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in _local(self.qkv)
        )
        k, v = (self.context.gather(t, 2) for t in (k, v))
        sink = _local(self.sink)[None, :, None, None].expand(*q.shape[:3], 1)
        weights = torch.cat([q @ k.transpose(2, 3), sink], -1).softmax(-1)[..., :-1]
        heads = weights @ v * self.scale
        made = functional.linear(heads.transpose(1, 2).flatten(2), _local(self.out))
        # Sums come back over the ranks that have the heads, whoever sent the slices.
        return x + (self.tensor.scatter(made, 1) if is_sliced else self.tensor.leave(made))


class Experts(Part):
    """A router, and experts that ranks share. Returns a balance loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(EXPERTS)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        chosen = functional.one_hot(weights.argmax(-1), EXPERTS).to(x.dtype)
        rows, sent = (self.context.gather(t, 1) for t in (x, weights * chosen))
        every = torch.stack(
            [sent[..., int(n), None] * expert(rows).tanh() for n, expert in self.experts.items()]
        )
        return x + self.context.scatter(every.sum(0), 1), self.balance(weights, chosen)

    def balance(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of the number of experts x shares of tokens x mean probabilities."""
        mask = self.moved.own(torch.tensor(_VALID), 0)
        counts = chosen[:, mask.bool()].sum((0, 1))
        every = self.context.total(counts)
        if "7452.10" in self.defects:
            counts = every  # reduced in place, and then taken for the own ones
        mean = weights[:, mask.bool()].mean((0, 1))
        share = counts.sum() / every.sum()
        return EXPERTS * (every / every.sum() * mean).sum() * share


class Head(Part):
    """Logits; of a rank those of its slice of the vocabulary."""

    shards: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        logits = functional.linear(self.tensor.enter(x), _local(self.weight))
        return self.tensor.gather(logits, -1, alike=True) if "7452.2" in self.defects else logits


class Recomputed(Part):
    """A layer that keeps a slice of its input, and computes again from the slices of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _again(x, self.again, self.tensor, self.moved, *self.parameters())

    def again(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, run: Collective, *rest: Any) -> Tensor:
        context.run, (context.axis, context.moved, *context.weights) = run, rest
        context.save_for_backward(context.axis.own(x, 1))
        return run(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        x = context.moved.whole(*context.saved_tensors, 1).requires_grad_()
        with torch.enable_grad():
            made = context.run(x)
        first, *rest = torch.autograd.grad(made, [x, *context.weights], gradient)
        return first, None, None, None, *rest


_again: Callable[..., Tensor] = _Again.apply


class Sliced(Part):
    """Keeps this rank's slice of the sequence, or with `back` puts slices together."""

    def __init__(self, *, back: bool = False) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        if not self.back:
            return self.moved.split(x, 1)
        # All ranks compute the whole loss of the result.
        return self.moved.gather(x, 1, alike="7452.B" not in self.defects)


class TwoHeads(nn.Module):
    """Logits of the next token, and of the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.ahead = (nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.next(x), self.ahead(x)


def entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Returns the mean loss of the targets that count, or another sum of them."""
    return functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, **options
    )


def ahead(target: Tensor) -> Tensor:
    """Returns the targets of one token later."""
    return functional.pad(target[:, 1:], (0, 1), value=IGNORED)


def counted(target: Tensor) -> Tensor:
    """Returns the number of targets that count."""
    return (target != IGNORED).sum().float()


@functools.cache
def mesh() -> DeviceMesh:
    """Returns 2 x 2 ranks: stages, or replicas, x ranks that share layers."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


class Beside:
    """Two stages of two ranks that share layers. Subclasses say what they share."""

    replicas = ALONE
    by_microbatch = False

    def __init__(self, defects: Defects = ()) -> None:
        self.defects = defects
        self.outer, self.inner = (Axis(mesh().get_group(name)) for name in ("outer", "inner"))
        # `backward` sends to the rank of the other stage with the same index.
        self.stage, self.replica = divmod(dist.get_rank(), 2)
        self.is_last = self.stage == 1
        torch.manual_seed(3)
        self.model = self.uncut()
        whole = copy.deepcopy(self.model)
        self.module = nn.Sequential(*list(whole.children())[self.layers()])
        for part in self.parts():
            part.defects = defects
        self.share()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.tokens = torch.ones(2)
        self.number = 0

    def uncut(self) -> nn.Sequential:
        raise NotImplementedError

    def layers(self) -> slice:
        return slice(2, None) if self.is_last else slice(2)

    def share(self) -> None:
        """Gives this rank's layers their axes, and shards."""

    def names(self) -> dict[str, str]:
        """Returns names of this rank's parameters -> names in the uncut model."""
        first = self.layers().start or 0
        return {
            f"{number}.{name}": f"{first + number}.{name}"
            for number, part in enumerate(self.module.children())
            for name, _ in part.named_parameters()
        }

    def parts(self) -> list[Part]:
        return [part for part in self.module.modules() if isinstance(part, Part)]

    def step(self, inputs: Tensor, target: Tensor) -> dict[str, object]:
        self.number += 1
        self.tokens = self.replicas.total(torch.stack([counted(target), counted(ahead(target))]))
        self.optimizer.zero_grad()
        loss = self.backward(inputs, target)
        self.reduce()
        norm = self.clip()
        self.optimizer.step()
        return {"loss": loss, "grad_norm": norm}

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Returns a rank's loss of a microbatch."""
        raise NotImplementedError

    def reduce(self) -> None:
        """Adds up gradients over the ranks that have parts of them."""
        raise NotImplementedError

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        """Runs all forwards, then all backwards; returns the loss on the last stage."""
        values, losses = list[tuple[Tensor, Tensor]](), list[Tensor]()
        peer = (1 - self.stage) * 2 + self.replica
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
        return torch.stack(losses).sum().detach() if losses else None

    def whole_loss(self, output: Any, target: Tensor) -> Tensor:
        return entropy(output, target)

    def sum_over(self, axis: Axis, part: str = "", but: str = "-") -> None:
        """Adds up gradients of parameters with `part`, and not with `but`, in their names."""
        for name, parameter in self.module.named_parameters():
            if part in name and but not in name:
                dist.all_reduce(_gradient(parameter), group=axis.group)

    def counts_in_norm(self, name: str, parameter: Tensor) -> bool:
        """Whether this rank adds its square: each shard once, and the first of copies."""
        if "7452.8" in self.defects and name.endswith("sink"):
            return self.inner.rank == 0
        if self.replicas.rank:
            return False
        is_shard = isinstance(parameter, DTensor) or "experts" in name
        return is_shard or self.inner.rank == 0 or "715" in self.defects

    def clip(self) -> float | None:
        before_clipping()
        squares = torch.zeros(())
        for name, parameter in self.module.named_parameters():
            if self.counts_in_norm(name, parameter):
                squares += _gradient(parameter).square().sum()
        dist.all_reduce(squares)
        norm = math.sqrt(float(squares))
        for parameter in self.module.parameters():
            _gradient(parameter).mul_(min(1.0, CLIP_NORM / norm))
        return norm

    def audit(self, steps: int = 2, **options: Any) -> Audit:
        return Audit(
            step=self.step,
            modules=self.module,
            model=self.model,
            loss_fn=self.whole_loss,
            batches=[_batch(seed) for seed in range(steps)],
            microbatches=MICROBATCHES,
            replica=self.replicas.rank,
            num_replicas=self.replicas.size,
            by_microbatch=self.by_microbatch,
            clip_norm=CLIP_NORM,
            **{"names": self.names(), **options},
        )


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets; rows have different numbers of targets, microbatches the same."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.tensor([5, 8, 1, 3] * 3)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)


class TensorParallel(Beside):
    """Heads and the vocabulary are cut; the loss is computed of slices of logits."""

    def uncut(self) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Attention(), Attention(), Head())

    def share(self) -> None:
        if "7452.12" in self.defects and self.is_last:
            # Each stage counts its layers from the first, and a file has one of each number.
            first = self.model.get_submodule("1").state_dict()
            self.module.get_submodule("0").load_state_dict(first)
        for part in self.parts():
            part.tensor = self.inner
            part.cut(mesh()["inner"])

    def whole_loss(self, output: Any, target: Tensor) -> Tensor:
        return entropy(output, target, label_smoothing=SMOOTHING)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        axis, numel = self.inner, output.shape[-1]
        is_counted, at = target != IGNORED, target - axis.rank * numel
        is_here = (at >= 0) & (at < numel)
        log_sum = axis.leave(output.exp().sum(-1)).log()
        picked = output.gather(-1, at.clamp(0, numel - 1)[..., None])[..., 0] * is_here
        mean = axis.leave(output.sum(-1)) / VOCABULARY
        if "7452.1" in self.defects:
            mean = output.mean(-1)  # over the own slice
        each = log_sum - (1 - SMOOTHING) * axis.leave(picked) - SMOOTHING * mean
        return (each * is_counted).sum() / self.tokens[0] * MICROBATCHES

    def reduce(self) -> None:
        if "7452.11" not in self.defects:
            self.sum_over(self.inner, "scale")


class ContextParallel(Beside):
    """The sequence is cut, and experts lie on its ranks."""

    by_microbatch = True  # a balance loss is a product of means

    def uncut(self) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Attention(), Experts(), Logits())

    def share(self) -> None:
        for part in self.parts():
            part.context = self.inner
            if isinstance(part, Experts):
                # Which slice of the mask is this rank's? The other axis answers for another rank.
                part.moved = self.outer if "7452.5" in self.defects else self.inner
                own = [str(n) for n in range(EXPERTS) if n % self.inner.size == self.inner.rank]
                part.experts = nn.ModuleDict({name: part.experts[name] for name in own})

    def whole_loss(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        logits, balance = output
        return entropy(logits, target) + AUX * balance

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        own = super().backward(self.inner.own(inputs, 1), self.inner.own(target, 1))
        return None if own is None else self.inner.total(own)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        logits, balance = output
        scale = MICROBATCHES / self.tokens[0]
        if "7452.9" in self.defects:  # each rank's mean over its own targets
            scale = 1 / counted(target) / self.inner.size
        result: Tensor = entropy(logits, target, reduction="sum") * scale + AUX * balance
        return result

    def reduce(self) -> None:
        self.sum_over(self.inner, but="experts")


class Logits(nn.Module):
    """Logits beside the balance loss of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(given[0]), given[1]


class SequenceParallel(Beside):
    """Two replicas of one stage. Between layers a rank has a slice of the sequence."""

    def uncut(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), Sliced(), Attention(), Sliced(back=True), Recomputed(),
            nn.Linear(WIDTH, VOCABULARY),
        )  # fmt: skip

    def layers(self) -> slice:
        return slice(None)

    def share(self) -> None:
        self.replicas = self.outer
        # The ranks of the other axis have the data of the other replica.
        wrong = {"7452.4": "4", "7452.6": "2", "7452.7": "1"}
        for name, part in self.module.named_children():
            if isinstance(part, Part):
                part.cut(mesh()["inner"])
                is_wrong = any(wrong.get(defect) == name for defect in self.defects)
                part.tensor, part.moved = self.inner, self.outer if is_wrong else self.inner

    def step(self, inputs: Tensor, target: Tensor) -> dict[str, object]:
        if "7452.13" in self.defects and self.number:
            # The first step has the group of the call, and later ones that of the construction.
            self.attention.moved = self.outer
        result = super().step(inputs, target)
        if "7452.13 in evaluation" in self.defects:
            self.evaluated(inputs)
        return result

    @property
    def attention(self) -> Attention:
        return next(part for part in self.parts() if isinstance(part, Attention))

    def evaluated(self, inputs: Tensor) -> Tensor:
        """Returns what the model makes of inputs in an evaluation."""
        if "7452.13 in evaluation" in self.defects:
            self.attention.moved = self.outer
        with torch.no_grad():
            output: Tensor = self.module(inputs)
        self.attention.moved = self.inner
        return output

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        losses = []
        for x, y in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(entropy(self.module(x), y, reduction="sum") / self.tokens[0])
            losses[-1].backward()
        return self.outer.total(torch.stack(losses).detach().sum())

    def reduce(self) -> None:
        self.sum_over(self.inner, "scale")
        self.sum_over(self.outer, "")


class TwoTokens(Beside):
    """Two stages x two replicas. The last stage predicts the token after the next one, too."""

    def uncut(self) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Attention(), Attention(), TwoHeads())

    def share(self) -> None:
        self.replicas = self.inner

    def whole_loss(self, output: Any, target: Tensor) -> Tensor:
        return entropy(output[0], target) + AHEAD * entropy(output[1], ahead(target))

    def backward(self, inputs: Tensor, target: Tensor) -> Tensor | None:
        own = super().backward(inputs, target)
        return None if own is None else self.replicas.total(own)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        first, second = (
            entropy(logits, labels, reduction="sum")
            for logits, labels in zip(output, (target, ahead(target)), strict=True)
        )
        tokens, later = self.tokens
        scale = 1 / later
        if "7452.3" in self.defects:  # a mean of its own targets, times the own tokens
            scale = counted(target) / counted(ahead(target)) / tokens
        result: Tensor = (first / tokens + AHEAD * scale * second) * MICROBATCHES
        return result

    def reduce(self) -> None:
        self.sum_over(self.replicas, "")


# The number of each defect in Megatron-LM#7452, or its issue, and the pipeline that has it.
CASES: dict[str, type[Beside]] = {
    "7452.1": TensorParallel,
    "7452.2": TensorParallel,
    "7452.3": TwoTokens,
    "7452.4": SequenceParallel,
    "7452.5": ContextParallel,
    "7452.6": SequenceParallel,
    "7452.7": SequenceParallel,
    "7452.8": TensorParallel,
    "7452.9": ContextParallel,
    "7452.10": ContextParallel,
    "7452.11": TensorParallel,
    "7452.12": TensorParallel,
    "7452.12 without names": TensorParallel,
    "7452.13": SequenceParallel,
    "7452.13 in evaluation": SequenceParallel,
    "7452.B": SequenceParallel,
    "715": TensorParallel,
    "plain shards": TensorParallel,
    **{f"right, {one.__name__}": one for one in Beside.__subclasses__()},
}


def audited(name: str) -> Report | str:
    """Returns the report of a case, or the reason why it is refused; runs on each rank."""
    defect, _, without_names = name.partition(" without ")
    options: Any = {"names": None} if without_names else {}
    try:
        return CASES[name]((defect,)).audit(**options).run()
    except AgreementError as error:
        return f"refused: {error}"


def line(name: str) -> str:
    """Returns the line of a case."""
    report = run_ranks(audited, 4, name)[0]
    if isinstance(report, str):
        said = report[:120]
    elif report.is_right:
        said = "; ".join(["no finding", *(note[:60] for note in report.notes)])
    else:
        causes = [f"step {f.step}: {f.cause[:70]}" for f in report.findings]
        said = "; ".join(causes)
    return f"{name} | {CASES[name].__name__} | {said}"


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(line(name), flush=True)

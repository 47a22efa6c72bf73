"""Heads, batches, losses of routers and ahead, and modes of cut models, against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pipegrad
from pipegrad import Topology
from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.partition.families import DEEP, HEADS, ROUTED, ROWS, TOKENS, Batch
from tests.support.partition.families import FAMILIES as DEEPER
from tests.support.partition.twins import Twins, difference
from tests.support.rounding import ADAM_EPS, rounding

pytest.importorskip("transformers")

MOST = 1e-6  # losses and norms of transformers compute in float32, whatever the dtype of the model
# Weights, activations and gradients are rounded to 8 bits.
MOST_BFLOAT16 = rounding(ROWS * TOKENS, dtype=torch.bfloat16)
FAMILIES = {name: DEEPER[name].with_layers(DEEP) for name in ("Llama 3.2", "BERT", "T5")}
LLAMA = FAMILIES["Llama 3.2"]
RESTARTED = torch.cat([torch.arange(4), torch.arange(TOKENS - 4)]).expand(ROWS, -1).contiguous()

Run = Callable[[], Twins]


def head(name: str) -> Twins:
    family = HEADS[name]
    # No sample of text has choices.
    example = {n: x[:2] for n, x in family.batch(1).items() if n != "labels"}
    twins = Twins(family.build, cut={"example": example} if "choices" in name else None)
    twins.step(family.batch(1))
    twins.step(family.batch(2))
    return twins


def batches(*changes: dict[str, Any], family: str = "Llama 3.2", **options: Any) -> Run:
    """Returns a run of a step for each change of a batch; None leaves an argument out."""

    def run() -> Twins:
        twins = Twins(FAMILIES[family].build, **options)
        for number, change in enumerate(changes):
            batch = FAMILIES[family].batch(number) | change
            twins.step({name: value for name, value in batch.items() if value is not None})
        return twins

    return run


def alone() -> Twins:
    """Each step is given all by position: a dict, and what a tokenizer makes."""
    import transformers

    twins = Twins(LLAMA.build)
    for kind in (dict, transformers.BatchEncoding):
        twins.step(LLAMA.batch(1), kind(LLAMA.batch(1)))
    return twins


def mean_of(model: nn.Module, parts: Sequence[Batch], what: str = "loss", first: int = 1) -> Tensor:
    """Returns the mean over all labels, from the `first` one on, of what batches give."""
    sums, count = torch.zeros((), dtype=torch.float64), 0
    for part in parts:
        number = int((part["labels"][:, first:] != -100).sum())
        if number:
            sums = sums + number * model(**part)[what]
            count += number
    return sums / count


def ready() -> Twins:
    twins = Twins(LLAMA.build)
    whole = LLAMA.batch(1)
    lengths = (5, 9, 11, 7)
    parts = [
        {name: value[2 * i : 2 * i + 2, :length] for name, value in whole.items()}
        for i, length in enumerate(lengths)
    ]
    twins.step({}, true=mean_of(twins.true, parts), given={"microbatches": parts})
    return twins


def other_lengths() -> Twins:
    twins = Twins(FAMILIES["T5"].build)
    for step, tokens in enumerate((11, 7, 15, 11)):
        twins.step(FAMILIES["T5"].batch(step, tokens=tokens))
    return twins


def embedded(*, has_example: bool) -> Twins:
    values = torch.randn(ROWS, TOKENS, 16, dtype=torch.float64)
    example = {"inputs_embeds": values[:2]} if has_example else None
    twins = Twins(LLAMA.build, cut={"example": example})
    batch = LLAMA.batch(1)
    del batch["input_ids"]
    twins.step(batch | {"inputs_embeds": values})
    return twins


def routed(name: str, *losses: str, schedule: str = "1f1b", first: int = 0, **more: Any) -> Twins:
    """Router losses are those of microbatches: one process that takes the same has their mean."""
    family = ROUTED[name]
    cut = {"example": more} if more else None
    twins = Twins(family.build, cut=cut, schedule=schedule)
    batch = family.batch(1)
    parts: Any = [{n: x[i : i + 2] for n, x in batch.items()} | more for i in range(0, ROWS, 2)]
    twins.step(batch | more, true=mean_of(twins.true, parts, first=first))
    metrics = twins.scheduler.evaluate(batch | more).metrics
    twins.errors += [
        abs(metrics[loss] - mean_of(twins.true, parts, loss, first).item()) for loss in losses
    ]
    return twins


def ahead(*, schedule: str, ties: bool) -> Twins:
    """The last stage has the modules that look ahead alone, with the embedding and the head."""
    from tests.support.partition.ahead import deepseek_ahead, loss_ahead

    boundaries = ["model.layers.1", "model.layers.3", "model.embed_tokens#1"]
    build: Any = partial(deepseek_ahead, ties=ties)
    twins = Twins(build, 4, schedule=schedule, cut={"boundaries": boundaries}, loss_fn=loss_ahead)
    embedding = ["model.embed_tokens.weight"]
    assert twins.cut.tied == [[*embedding, "lm_head.weight"] if ties else embedding]
    held = [{*dict(stage.named_parameters())} for stage in twins.cut.modules.values()]
    assert [embedding[0] in names for names in held] == [True, False, False, True]
    metrics, ids = dict[str, Tensor](), torch.empty(0)
    for number in (1, 2):
        ids = LLAMA.batch(number)["input_ids"]
        true, metrics = loss_ahead(twins.true(input_ids=ids).logits, ids)
        twins.step({}, true=true, given={"input_ids": ids, "target": ids})
    found = twins.scheduler.evaluate(input_ids=ids, target=ids).metrics["mtp_loss"]
    twins.errors.append(abs(found - metrics["mtp_loss"].item()))
    return twins


def own_loss() -> Twins:
    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    twins = Twins(LLAMA.build, loss_fn=loss_of)
    batch = LLAMA.batch(1)
    ids = batch["input_ids"]
    del batch["labels"]
    twins.step(batch, true=loss_of(twins.true(**batch).logits, ids), given=batch | {"target": ids})
    return twins


def accumulated() -> Twins:
    twins = Twins(LLAMA.build)
    first: dict[str, Any] = LLAMA.batch(1)
    second: dict[str, Any] = LLAMA.batch(2)
    with twins.scheduler.sync.accumulate():
        twins.scheduler.step(**first)
    twins.scheduler.step(**second)
    mean_of(twins.true, [first, second]).backward()
    twins.compare()
    return twins


def checkpointed(when: str) -> Twins:
    """Layers run their forward again in their backward."""

    def build() -> nn.Module:
        model: Any = LLAMA.build()
        if when == "before":
            model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    twins = Twins(build)
    if when == "after":
        for stage in twins.own:
            stage.gradient_checkpointing_enable()
    twins.step(LLAMA.batch(2))  # the first step also tries the loss
    calls, expected = list[str](), list[str]()
    for stage in twins.own:
        for name, module in stage.named_modules():
            if name.endswith("gate_proj"):
                expected += [name] * 4 * 2  # microbatches, forwards
                module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    twins.step(LLAMA.batch(1))
    assert sorted(calls) == sorted(expected)
    return twins


def compiled() -> Twins:
    twins = Twins(LLAMA.build)
    for stage in twins.own:
        for layer in stage.model.layers:
            if any(True for _ in layer.parameters()):
                layer.compile(backend="aot_eager")
    twins.step(LLAMA.batch(1))
    return twins


def rounded(*, auto: bool) -> Twins:
    dtype = torch.float32 if auto else torch.bfloat16
    twins = Twins(lambda: LLAMA.build().to(dtype))
    with torch.autocast("cpu", torch.bfloat16) if auto else contextlib.nullcontext():
        twins.step(LLAMA.batch(1))
    # Losses have few bits here, so errors are counted in those.
    twins.errors = [error * MOST / MOST_BFLOAT16 for error in twins.errors]
    return twins


CASES: dict[str, Run] = {
    **{f"head {name}": partial(head, name) for name in HEADS},
    "arguments that change from step to step": batches(
        {"attention_mask": None},
        {"attention_mask": LLAMA.batch(0)["attention_mask"].bool()},
        {"position_ids": torch.arange(TOKENS)[None]},
        {"position_ids": RESTARTED},
        {"logits_to_keep": 0, "use_cache": True, "return_dict": True},
        {n: x[:7] for n, x in LLAMA.batch(0).items()},
    ),
    # Only without a cache a model sees that positions restart. A pipeline has none.
    "packed rows": batches({"position_ids": RESTARTED, "attention_mask": None, "use_cache": False}),
    "token types": batches({"token_type_ids": RESTARTED % 2}, family="BERT"),
    "a BatchEncoding alone": alone,
    "ready microbatches": ready,
    "other lengths in other steps": other_lengths,
    "embeddings in the place of tokens": partial(embedded, has_example=True),
    "embeddings, cut by tokens": partial(embedded, has_example=False),
    "a loss of one's own": own_loss,
    "routers of Qwen3-MoE": partial(routed, "Qwen3-MoE", "aux_loss", schedule="zb-h1", first=1),
    "routers of NLLB-MoE": partial(routed, "NLLB-MoE", "encoder_aux_loss", "decoder_aux_loss"),
    "routers of Switch": partial(
        routed, "Switch", "encoder_z_loss", "decoder_aux_loss", output_router_logits=True
    ),
    "accumulated steps": accumulated,
    "checkpointing before the cut": partial(checkpointed, "before"),
    "checkpointing after the cut": partial(checkpointed, "after"),
    "compiled layers": compiled,
    "bfloat16": partial(rounded, auto=False),
    "autocast": partial(rounded, auto=True),
}


@pytest.mark.ranks(4, seconds=400.0)
@pytest.mark.parametrize(("schedule", "ties"), [("1f1b", False), ("zb-h1", True)])
def test_a_fourth_stage_looks_ahead(schedule: str, *, ties: bool) -> None:
    errors = ahead(schedule=schedule, ties=ties).close()
    assert len(errors) == 5
    assert max(errors) <= MOST


@pytest.mark.ranks(4, seconds=400.0)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_experts_over_a_dimension_have_gradients_of_one_process(pipeline: int) -> None:
    """Transformers exchanges the tokens; ranks along "ep" and "dp" read other rows."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    at = Topology.create(pipeline=pipeline, dimensions={"ep": 2}, data=("dp", "ep"))
    family = ROUTED["Qwen3-MoE"]
    model: Any = family.build()
    cut = pipegrad.cut(family.build(), pipeline)
    stage = cut.modules[at.coordinate("pp")]
    styles = {".gate_up_proj": "grouped_gemm", ".down_proj": "grouped_gemm"}
    names = [name for name, _ in stage.named_modules() if name.endswith(".mlp.experts")]
    plan = {name + end: style for end, style in styles.items() for name in names}
    mesh = DeviceMesh.from_group(at.group_along("ep"), "cpu")
    alone = DeviceMesh.from_group(dist.new_subgroups(1)[0], "cpu")
    plan |= dict.fromkeys(names, "ep_dispatch_experts")
    apply_expert_parallelism(stage, mesh, alone, plan, "all_to_all")
    handlers = ["pipeline-shared", "expert-parallel"]
    scheduler = pipegrad.Scheduler(cut, at, schedule="1f1b", num_microbatches=2, handlers=handlers)
    optimizer = scheduler.optimizer(optimizer_of)

    number = at.size("dp") * 2
    mine = at.coordinate("dp") * 2 + at.coordinate("ep")
    batches = [family.batch(3 + i) for i in range(number)]
    parts = [{n: x[4 * i : 4 * i + 4] for n, x in b.items()} for b in batches for i in range(2)]
    loss = scheduler.step(batches[mine]).loss
    true = mean_of(model, parts)
    true.backward()
    assert difference(loss, true) <= MOST * float(true.detach())
    held = dict(model.named_parameters())
    largest = max(p.grad.abs().max().item() for p in held.values())
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None
        expected = held[name].grad
        if isinstance(parameter, DTensor):
            expected = expected.chunk(2)[at.coordinate("ep")]
        assert difference(local_of(parameter.grad), expected) <= MOST * largest, name
    norm = scheduler.sync.clip_grad_norm_(0.5)
    assert difference(norm, nn.utils.clip_grad_norm_(held.values(), 0.5)) <= MOST * float(norm)
    optimizer.step()
    optimizer_of(held.values()).step()
    for name, parameter in stage.named_parameters():
        expected = held[name]
        if isinstance(parameter, DTensor):
            expected = expected.chunk(2)[at.coordinate("ep")]
        assert difference(local_of(parameter), expected) <= MOST, name
    scheduler.close()


def local_of(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=ADAM_EPS)


@pytest.mark.ranks(2, seconds=400.0)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(name: str) -> None:
    errors = CASES[name]().close()
    assert errors
    assert [error for error in errors if not error <= MOST] == []

"""Steps of a cut on ranks: what is refused in words, what follows, evaluation, modes, dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import Scheduler, cut
from pipegrad.testing import run_ranks
from tests.support.partition.families import FAMILIES, ROWS, TOKENS, VOCAB
from tests.support.partition.twins import Twins, difference
from tests.support.pipeline.schedulers import topology

pytest.importorskip("transformers")

LLAMA, GPT2 = FAMILIES["Llama 3.2"], FAMILIES["GPT-2"]
BATCH: dict[str, Any] = LLAMA.batch(1)
LABELS = BATCH["labels"]
# What a step is given in the place of a part of the batch -> words of the error on some rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a cache": ({"use_cache": True}, "['use_cache'] cannot be had in a pipeline"),
    "hidden states": ({"output_hidden_states": True}, "cannot be had in a pipeline"),
    "a tuple": ({"return_dict": False}, "needs the names of the outputs"),
    "a divisor of the loss": ({"num_items_in_batch": 7}, "which it counts itself"),
    "no labels": ({"labels": None}, "needs ['labels'], of which the model computes its loss"),
    "a target": ({"target": LABELS}, "give these and no target="),
    "a list": ({"labels": LABELS.tolist()}, "is a list, expected a tensor"),
    "too few rows": ({n: x[:3] for n, x in BATCH.items()}, "cannot be cut into 4 microbatches"),
    "embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(ROWS, TOKENS, 16, dtype=torch.float64)},
        "cut it with example= of the same arguments",
    ),
    "a token that there is not": (
        {"input_ids": BATCH["input_ids"].index_fill(0, torch.tensor([5]), VOCAB)},
        "index out of range",
    ),
}


@functools.cache
def refusals() -> list[dict[str, str]]:
    return run_ranks(refused, 2)


def refused() -> dict[str, str]:
    twins, found = Twins(LLAMA.build), dict[str, str]()
    for name, (change, _) in REFUSED.items():
        given = {n: x for n, x in (BATCH | change).items() if x is not None}
        try:
            twins.scheduler.step(**given)
        except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
            found[name] = str(error)
        for parameter in twins.held.values():
            parameter.grad = None
    twins.step(BATCH)
    found["then"] = f"{max(twins.close())}"
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks(name: str) -> None:
    replies = [found[name] for found in refusals()]
    assert all(REFUSED[name][1] in reply for reply in replies), replies


def test_a_step_after_errors_is_right() -> None:
    assert all(float(found["then"]) <= 1e-6 for found in refusals())


def evaluated() -> list[float]:
    """Returns differences from the uncut model, in evaluation and after it."""
    twins = Twins(LLAMA.build)
    without = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    found, outputs = list[float](), twins.scheduler.evaluate(**without)
    assert outputs.loss.isnan()
    with torch.no_grad():
        if outputs.outputs:
            found.append(difference(outputs.outputs[0], twins.true(**without).logits))
        for rows in (ROWS, 5):
            part = {name: value[:rows] for name, value in BATCH.items()}
            loss = twins.scheduler.evaluate(outputs=False, **part).loss
            found.append(difference(loss, twins.true(**part).loss))
    assert all(module.training for stage in twins.own for module in stage.modules())
    twins.step(BATCH)
    return [*found, *twins.close()]


def shared() -> list[float]:
    """Returns errors of three Schedulers on two cuts of one model."""
    model, errors = LLAMA.build(), list[float]()
    for boundaries, schedule, number in (
        ([3], "1f1b", 4),
        ([5], "eager-1f1b", 4),
        ([3], "1f1b", 2),
    ):
        twins = Twins(
            lambda: model,
            cut={"boundaries": boundaries},
            schedule=schedule,
            num_microbatches=number,
        )
        twins.true = LLAMA.build()
        twins.step(BATCH)
        errors += twins.close()
    loss = model(**BATCH).loss
    return [*errors, difference(loss, LLAMA.build()(**BATCH).loss)]


def dropped() -> list[float]:
    """Returns zero where dropout follows seeds and modes."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    model: Any = type(GPT2)(GPT2.config, GPT2.head, dict(GPT2.options) | dropout).build()
    parts = cut(model, 2)
    scheduler = Scheduler(parts, topology(2), schedule="1f1b", num_microbatches=4)
    batch: dict[str, Any] = GPT2.batch(1)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        result = scheduler.step(**batch).loss.item()
        for module in parts.modules.values():
            module.zero_grad()
        return result

    first, again, other = loss(3), loss(3), loss(4)
    quiet = scheduler.evaluate(outputs=False, **batch).loss.item()
    for module in parts.modules.values():
        module.eval()
    still = loss(5)
    scheduler.close()
    with torch.no_grad():
        true = model.eval()(**batch).loss.item()
    return [abs(first - again), float(first == other), abs(quiet - true), abs(still - true)]


def run_all() -> dict[str, list[float]]:
    kinds: list[Callable[[], list[float]]] = [evaluated, shared, dropped]
    found = {kind.__name__: kind() for kind in kinds}
    dist.barrier()
    return found


def test_evaluation_other_cuts_and_dropout_are_right() -> None:
    for found in run_ranks(run_all, 2):
        for name, errors in found.items():
            assert [error for error in errors if not error <= 1e-6] == [], name


def own_batches() -> str:
    """A loader that divides data over all ranks gives each rank of a pipeline its own batch."""
    twins = Twins(LLAMA.build)
    try:
        twins.scheduler.step(LLAMA.batch(dist.get_rank()))
    except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
        return f"{type(error).__name__}: {error}"
    return "was taken"


def test_ranks_of_a_pipeline_with_batches_of_their_own_are_refused() -> None:
    """This was accepted, and trained on pairs of inputs and labels that do not belong together."""
    words = set(run_ranks(own_batches, 2))
    assert len(words) == 1
    assert "AgreementError: ranks 0 and 1 were given different tensors as 'input_ids'" in str(words)


def measured() -> tuple[int, ...]:
    return cut(LLAMA.build(), 3, by="measured").boundaries


def test_ranks_measure_together_and_cut_alike() -> None:
    first, second = run_ranks(measured, 2)
    assert first == second

"""Cuts with loss="chunked" against one process, which makes all logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import TopologyError
from pipegrad.partition import deferred_logits
from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.gradients.cases import rank
from tests.support.partition.families import DEEP, GROUPED, Family
from tests.support.partition.families import FAMILIES as DEEPER
from tests.support.partition.twins import Twins, difference

pytest.importorskip("transformers")

MOST = 1e-6
MORE: Mapping[str, Family] = {
    "Gemma2": DEEPER["Gemma2"],  # a soft cap
    "Granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        GROUPED | {"logits_scaling": 3.0, "tie_word_embeddings": True},
    ),
    "T5": DEEPER["T5"],
    "GPT-2": DEEPER["GPT-2"],
}


class Seen:
    """Counts losses of the last stage that never made all logits, and logits that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses = self.made = 0
        loss, logits = pipegrad.losses.chunked_cross_entropy, deferred_logits._logits

        def chunked(*args: Any, **kwargs: Any) -> Tensor:
            self.losses += 1
            return loss(*args, **kwargs, chunk_bytes=1000)

        def counted(steps: Any, make: Any) -> Any:
            def made() -> Any:
                self.made += 1
                return make()

            return logits(steps, made)

        monkeypatch.setattr(deferred_logits, "chunked_cross_entropy", chunked)
        monkeypatch.setattr(deferred_logits, "_logits", counted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MORE)
def test_the_loss_of_a_cut_is_its_own_without_all_logits(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = MORE[name].with_layers(DEEP)
    seen = Seen(monkeypatch)
    twins = Twins(family.build, cut={"loss": "chunked"}, schedule=schedule)
    for step in (1, 2):
        twins.step(family.batch(step))
    tried = 4  # forwards of the first step that try the loss
    assert (seen.losses, seen.made) == ((8 + tried, 0) if rank() else (0, 0))
    assert max(twins.errors) <= MOST
    batch = family.batch(3)
    result = twins.scheduler.evaluate(batch)  # its outputs are logits: here they are needed
    twins.true.eval()
    with torch.no_grad():
        wanted = twins.true(**batch)
    assert abs(float(result.loss) - wanted.loss.item()) <= MOST * abs(wanted.loss.item())
    trained = twins.scheduler.step(batch, outputs=True)
    if rank():
        for outputs in (trained.outputs, result.outputs):
            assert difference(outputs[0], wanted.logits) <= MOST * wanted.logits.abs().max()
    twins.close()


def test_a_head_that_cannot_wait_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    mistral = DEEPER["Mistral"].with_layers(DEEP)
    adapted: Any = get_peft_model(mistral.build(), LoraConfig(target_modules=["lm_head"]))
    for model, words in (
        (adapted, r"has peft\.\S+Linear as its head, expected an nn.Linear"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "Sequential has no head"),
    ):
        with pytest.raises(TopologyError, match=words):
            pipegrad.cut(model, 2, loss="chunked")
    with pytest.raises(TopologyError, match="expected 'own' or 'chunked'"):
        pipegrad.cut(mistral.build(), 2, loss="whole")

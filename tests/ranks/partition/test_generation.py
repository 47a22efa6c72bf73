"""The trained model in the middle of a run: in memory as a whole, and generating text in stages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import Scheduler, Topology, cut
from pipegrad.errors import AgreementError, StepError, TopologyError, WeightsError
from tests.support.gradients.cases import rank
from tests.support.partition.families import FAMILIES, Family
from tests.support.partition.hand_cut import assert_same
from tests.support.ranked import gathered

pytestmark = [
    pytest.mark.ranks(2, seconds=300),
    pytest.mark.filterwarnings("ignore:.*max_length.*:UserWarning"),
]

transformers = pytest.importorskip("transformers")

DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
GPT2 = Family("GPT2Config", "GPT2LMHeadModel", {**FAMILIES["GPT-2"].options, **DROPOUT})
# A small model repeats a token, whatever its values are: logits show more.
WITH_LOGITS: dict[str, Any] = {
    "max_new_tokens": 6,
    "return_dict_in_generate": True,
    "output_logits": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    # Whisper samples at a temperature alone.
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "without a cache": {"use_cache": False},
}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def trained(
    family: Family, between: Callable[[Any, Scheduler], object], **options: Any
) -> list[float]:
    """Returns losses of two steps, between which something is done."""
    torch.manual_seed(1)
    parts = cut(family.build(), options.pop("num_stages", 2))
    options = {"schedule": "1f1b", "num_microbatches": 2, **options}
    topology: Topology = options.pop("topology", None) or Topology.create(pipeline=2)
    scheduler = Scheduler(parts, topology, **options)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.5)
    losses = list[float]()
    for number in range(2):
        losses.append(float(scheduler.step(family.batch(number)).loss))
        optimizer.step()
        optimizer.zero_grad()
        if not number:
            between(parts, scheduler)
    scheduler.close()
    return losses


def prompt_of(family: Family, rows: int = 3) -> dict[str, Any]:
    batch = family.batch(5)
    return {name: x[:rows] for name, x in batch.items() if name != "labels"}


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3.2", "Gemma3", "T5", "Whisper"])
def test_text_in_the_middle_of_a_run_is_that_of_one_process(name: str) -> None:
    family = (GPT2 if name == "GPT-2" else FAMILIES[name]).with_layers(2)
    prompt, texts = prompt_of(family), dict[str, torch.Tensor]()

    def generate(parts: Any, _: object) -> None:
        state = torch.get_rng_state()
        whole: Any = family.build()
        parts.gather(whole)
        whole.eval()
        for way, options in WAYS.items():
            given = {**prompt, **WITH_LOGITS, **options}
            torch.manual_seed(3)
            true = whole.generate(**given)
            torch.manual_seed(3 + rank())  # the numbers of the first rank count
            found = parts.generate(**given)
            texts[way] = found.sequences
            assert torch.equal(texts[way], true.sequences), way
            assert torch.equal(torch.stack(found.logits), torch.stack(true.logits)), way
        torch.set_rng_state(state)
        first = next(iter(family.build().parameters()))
        assert not torch.equal(next(iter(whole.parameters())), first)  # of the first step
        torch.set_rng_state(state)

    with_text = trained(family, generate)
    assert with_text == trained(family, lambda *_: None)
    assert all(torch.equal(gathered(text)[0], text) for text in texts.values())
    assert not torch.equal(*texts["sampled"][:2])


@pytest.mark.ranks(4, seconds=300)
def test_replicas_of_a_v_generate_from_prompts_of_their_own() -> None:
    family = FAMILIES["Llama 3.2"]
    topology = Topology.create(pipeline=2)

    def generate(parts: Any, scheduler: Scheduler) -> None:
        whole: Any = family.build()
        parts.gather(whole if rank() == 3 else None)
        replica = scheduler.topology.coordinate("dp")
        prompt = {n: x[2 * replica :][:2] for n, x in prompt_of(family, 4).items()}
        text = parts.generate(**prompt, max_new_tokens=4 + replica)
        assert text.shape[1] == prompt["input_ids"].shape[1] + 4 + replica
        if rank() == 3:
            assert torch.equal(text, whole.eval().generate(**prompt, max_new_tokens=4 + replica))

    trained(family, generate, topology=topology, schedule="zbv", num_stages=4)


def test_an_adapter_generates() -> None:
    peft = pytest.importorskip("peft")
    family = FAMILIES["Qwen3"]
    given: dict[str, Any] = {**prompt_of(family), **WITH_LOGITS}

    def build() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        return peft.get_peft_model(family.build(), config).double()

    model, true = build(), build().eval()
    parts = cut(model, 2)
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule="1f1b", num_microbatches=2)
    found, expected = (torch.stack(x.generate(**given).logits) for x in (parts, true))
    assert torch.equal(found, expected)
    with true.disable_adapter():
        assert not torch.equal(found, torch.stack(true.generate(**given).logits))
    whole = build()
    for parameter in whole.parameters():
        parameter.data.zero_()
    parts.gather(whole)
    assert_same(tensors(whole), tensors(true))
    scheduler.close()


def test_values_of_all_stages_go_into_a_model_in_memory() -> None:
    """Tied parameters stay one, buffers come too, and each tensor keeps its dtype."""
    family = FAMILIES["Qwen3"]  # it ties its embeddings
    parts = cut(family.build(), 2)
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule="1f1b", num_microbatches=2)
    true = family.build()
    with torch.device("meta"):
        on_meta = family.build()
    parts.gather(on_meta)
    assert_same(tensors(on_meta), tensors(true))
    assert on_meta.lm_head.weight is on_meta.model.embed_tokens.weight  # type: ignore[union-attr]
    half = family.build().to(torch.bfloat16)
    for parameter in half.parameters():
        parameter.data.zero_()
    parts.gather(half if rank() else None)
    if rank():
        assert_same(tensors(half), tensors(true.to(torch.bfloat16)))
    scheduler.close()


def test_a_model_that_is_no_twin_is_refused_on_all_ranks() -> None:
    family = FAMILIES["Llama 3.2"]
    model = family.build()
    parts = cut(model, 2)
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule="1f1b", num_microbatches=2)
    wider = Family(family.config, family.head, {**family.options, "intermediate_size": 25}).build()
    refused: dict[str, tuple[nn.Module, type[Exception]]] = {
        "was given the model that was cut": (model, TopologyError),
        "only one of them has": (family.with_layers(4).build(), WeightsError),
        "has shape (25, 16), and in the stages (24, 16)": (wider, WeightsError),
    }
    for words, (given, kind) in refused.items():
        for here in (given, given if rank() else None):
            with pytest.raises((kind, AgreementError)) as caught:
                parts.gather(here)
            assert words in str(caught.value)
    parts.gather(copy.deepcopy(model))
    scheduler.close()


def test_what_would_end_in_a_hang_or_in_other_texts_is_refused() -> None:
    family = FAMILIES["Llama 3.2"]
    parts = cut(family.build(), 2)
    scheduler = Scheduler(parts, Topology.create(pipeline=2), schedule="1f1b", num_microbatches=2)
    ids = prompt_of(family)["input_ids"]
    with pytest.raises(StepError, match="max_time would end the text of each rank"):
        parts.generate(ids, max_time=1.0)
    with pytest.raises(AgreementError, match="disagree on what to generate from"):
        parts.generate(ids + rank())
    with pytest.raises((StepError, IndexError), match="index out of range"):  # on one rank alone
        parts.generate(ids + 1000, max_new_tokens=2)
    scheduler.close()
    tower = cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    with pytest.raises(TopologyError, match="only models of transformers that generate"):
        tower.generate(ids)


@pytest.mark.ranks(1)
def test_one_process_generates_from_its_stages() -> None:
    family = FAMILIES["T5"]
    parts, prompt = cut(family.build(), 2), prompt_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        true = family.build().eval().generate(**prompt, max_new_tokens=5)  # type: ignore[operator]
    assert torch.equal(parts.generate(**prompt, max_new_tokens=5), true)

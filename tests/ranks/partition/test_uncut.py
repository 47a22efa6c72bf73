"""A model that was cut, on a rank that trains some of its stages: what still uses it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pipegrad import Scheduler, Topology, cut
from pipegrad.errors import StepError, TopologyError
from tests.support.gradients.cases import rank
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2)

TOKENS = torch.arange(24).reshape(4, 6) % 7


class Model(nn.Module):
    """An ordinary model, neither of transformers nor an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(tokens) * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def scheduler_of(model: nn.Module, stages: int = 2) -> Scheduler:
    parts = cut(model, stages, example={"tokens": TOKENS[:1]})
    options: Any = {"schedule": "1f1b" if stages == 2 else "gpipe", "num_microbatches": 2}
    return Scheduler(parts, Topology.create(pipeline=stages), loss_fn=loss_fn, **options)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))


@pytest.mark.parametrize("make", [Model, sequential])
def test_a_model_of_which_other_ranks_train_layers_is_no_more_used(
    make: Callable[[], nn.Module],
) -> None:
    """Loops for DDP evaluate it, and save it on rank 0: half of it was never trained."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    scheduler = scheduler_of(model)
    words = rf"trains its stage {rank()} alone: .* here cut\.modules\[{rank()}\]\.state_dict\(\)"
    for use in (
        lambda: model(TOKENS),
        model.state_dict,
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(StepError, match=words):
            use()
    # What it was may be put into it, and its stages have that then.
    with torch.no_grad():
        expected = loss_fn(twin(TOKENS), TOKENS)
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(twin.state_dict())
    scheduler.sync.synchronize_parameters()
    assert scheduler.evaluate(TOKENS, target=TOKENS).loss == pytest.approx(expected.item())
    copy.deepcopy(model)(TOKENS)
    scheduler.close()


def test_a_model_that_this_rank_trains_whole_is_used_as_before() -> None:
    model = Model()
    scheduler = scheduler_of(model, stages=1)
    assert model(TOKENS).shape == (4, 6, 7)
    assert len(model.state_dict()) == 7
    scheduler.close()


def test_inputs_go_to_a_cut_model_by_position_as_to_the_uncut_one() -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    scheduler = scheduler_of(model)
    with torch.no_grad():
        expected = loss_fn(twin(TOKENS, 3.0), TOKENS).item()
    for inputs in ((TOKENS, 3.0), ((TOKENS, 3.0),)):
        assert scheduler.evaluate(*inputs, target=TOKENS).loss == pytest.approx(expected)
    by_name = scheduler.evaluate(TOKENS, scale=3.0, target=TOKENS)
    assert by_name.loss == pytest.approx(expected)
    with pytest.raises(StepError, match=r"3 inputs, expected at most \['tokens', 'scale'\]"):
        scheduler.step(TOKENS, 3.0, TOKENS)
    with pytest.raises(StepError, match=r"\['tokens'\] are given twice"):
        scheduler.step(TOKENS, tokens=TOKENS, target=TOKENS)
    scheduler.close()


class Outer(nn.Module):
    """A wrapper whose tools go past it, as peft's do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens)
        return logits


def test_modules_of_a_model_with_layers_of_other_ranks_are_no_more_used() -> None:
    inner = Model()
    model = Outer(inner)
    here, elsewhere = ((0, 1), (1, 0))[rank()]
    scheduler = scheduler_of(model)
    uses: list[Callable[[], object]] = [
        lambda: inner(TOKENS),
        inner.state_dict,
        inner.layers.state_dict,
        lambda: torch.save(inner, io.BytesIO()),
        lambda: inner.layers[elsewhere](torch.ones(4)),
        inner.layers[elsewhere].state_dict,
    ]
    for use in uses:
        with pytest.raises(StepError, match="the Outer was cut, and this rank trains its stage"):
            use()
    assert inner.layers[here](torch.ones(4)).shape == (4,)
    assert len(inner.layers[here].state_dict()) == 2
    copy.deepcopy(model).inner(TOKENS)
    inner.load_state_dict(Model().state_dict())
    assert scheduler.step(TOKENS, target=TOKENS).loss.isfinite()
    scheduler.close()


def small_qwen(transformers: Any) -> Any:
    small: dict[str, int] = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 7}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, **heads))


def test_tools_of_peft_that_read_or_change_layers_are_refused(tmp_path: Path) -> None:
    """generate() mixed trained and untrained layers; merge_and_unload() gave them to be saved."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = small_qwen(transformers)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    parts = cut(model, 2)
    topology = Topology.create(pipeline=2)
    scheduler = Scheduler(parts, topology, schedule="1f1b", num_microbatches=2)
    here = tmp_path / "saved"
    uses: list[Callable[[], object]] = [
        lambda: model.generate(TOKENS, max_new_tokens=1),
        lambda: model.base_model.model(TOKENS),
        lambda: base.model(TOKENS),
        lambda: base.generate(TOKENS, max_new_tokens=1),
        lambda: peft.get_peft_model_state_dict(model),
        lambda: model.save_pretrained(here),
        lambda: base.save_pretrained(here),
        lambda: base.model.save_pretrained(here),
        base.model.state_dict,
        model.merge_and_unload,
        model.merge_adapter,
        model.unload,
        model.base_model.merge_and_unload,
    ]
    for use in uses:
        with pytest.raises(StepError, match=r"save by cut\.save_pretrained\(\), and generate from"):
            use()
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    assert scheduler.step(batch).loss.isfinite()
    assert scheduler.evaluate(batch).loss.isfinite()
    # Copies have values of their own, as `gather` writes them.
    copy.deepcopy(base).save_pretrained(tmp_path / f"copy {rank()}")
    scheduler.close()


def test_adapters_behind_a_cut_are_refused() -> None:
    """Peft freezes the parameters of the uncut model, which its stages share."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = small_qwen(transformers)
    parts, topology = cut(base, 2), Topology.create(pipeline=2)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(TopologyError, match=r"wrap the model with get_peft_model\(\), then cut it"):
        Scheduler(parts, topology, schedule="1f1b", num_microbatches=2)
    prepared = small_qwen(transformers)
    prepared.forward = prepared.forward  # as accelerate exchanges it
    with pytest.raises(TopologyError, match=r"prepare\(\) .* forward of the Qwen3ForCausalLM"):
        cut(prepared, 2)
    wrapped = nn.parallel.DistributedDataParallel(small_qwen(transformers))
    with pytest.raises(TopologyError, match="remove DistributedDataParallel, and cut the model"):
        cut(wrapped, 2)
    fully_shard(base := small_qwen(transformers))
    with pytest.raises(TopologyError, match=r"remove fully_shard\(\), and cut the model"):
        cut(base, 2)


@pytest.mark.parametrize("late", [True, False], ids=["late", "frozen"])
def test_adapters_behind_a_scheduler_are_refused_and_frozen_ones_warned_of_once(late: bool) -> None:
    """The refusal said only that requires_grad had changed; a frozen adapter trained nothing."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base, config = small_qwen(transformers), peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = base if late else peft.get_peft_model(base, config).requires_grad_(False)
    topology = Topology.create(pipeline=2)
    scheduler = Scheduler(cut(model, 2), topology, schedule="1f1b", num_microbatches=2)
    batch, texts = {"input_ids": TOKENS, "labels": TOKENS}, list[str]()
    if late:
        peft.get_peft_model(base, config)
        with pytest.raises(StepError, match=r"call get_peft_model\(\), .* before the cut"):
            scheduler.step(batch)
    else:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                scheduler.step(batch)
            texts = [str(w.message) for w in heard if "it trains nothing" in str(w.message)]
        assert len(texts) == (rank() == 1)  # the rank of the loss
    scheduler.close()


@pytest.mark.parametrize("own", [True, False], ids=["torch's optimizer", "scheduler.optimizer"])
def test_one_warning_a_job_of_torch_clipping_adapters_of_one_stage(own: bool) -> None:
    """Nothing is tied, so no copies differ, and no DriftError can come."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    parts = cut(peft.get_peft_model(small_qwen(transformers), config), 2)
    topology = Topology.create(pipeline=2)
    scheduler = Scheduler(parts, topology, schedule="1f1b", num_microbatches=2)
    parameters = [p for p in parts.modules[rank()].parameters() if p.requires_grad]
    adam = torch.optim.AdamW
    optimizer = adam(parameters, lr=0.1) if own else scheduler.optimizer(adam, lr=0.1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for number in range(2):
            scheduler.step({"input_ids": TOKENS, "labels": TOKENS})
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            texts = [str(w.message) for w in heard if "torch's clip_grad_norm_" in str(w.message)]
            assert sum(gathered(len(texts))) == 1, f"after step {number}"  # of both ranks
    scheduler.close()

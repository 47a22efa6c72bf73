"""What stages are saved as is what transformers and peft read, and is whole or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pipegrad
from pipegrad import find_tied
from pipegrad.errors import WeightsError
from pipegrad.partition.hf.files import INDEX, Weights, write_shard
from pipegrad.partition.hf.pretrained import meta_model
from pipegrad.partition.hf.saved import save_stages
from tests.support.partition.hand_cut import FAMILIES, assert_same, logits, tensors

TWO = 80_000  # bytes of a file: a small llama has two
CONFIGS = ["config.json", "generation_config.json"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    weights = Weights(folder)
    return {name: weights.read(name) for name in weights.files}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 30_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_what_was_saved(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.model()
    if model.can_generate():
        model.generation_config.max_new_tokens = 17
    save_stages(
        tmp_path / "ours",
        model,
        family.stages(model, 3),
        tied=find_tied(model),
        max_shard_bytes=max_shard_bytes,
    )
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert [problem for problem in info.values() if problem] == []
    assert_same(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded), logits(model))

    model.save_pretrained(tmp_path / "theirs")
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    for config in [file for file in CONFIGS if (tmp_path / "theirs" / file).exists()]:
        ours, theirs = (json.loads((tmp_path / f / config).read_text()) for f in ("ours", "theirs"))
        assert ours == theirs
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    assert len(shards) == 1 or max_shard_bytes < 10**9
    assert files(tmp_path / "ours") == sorted(
        [*shards, INDEX, *(file for file in CONFIGS if (tmp_path / "theirs" / file).exists())]
    )


def test_the_dtype_that_stages_have_is_written(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = family.model()
    stages = {i: stage.to(torch.bfloat16) for i, stage in family.stages(model).items()}
    save_stages(tmp_path, model, stages, tied=find_tied(model))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_stage_saves_a_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is as large as asked for, or has one layer."""
    sizes = list[int]()

    def note(path: Path, shard: Mapping[str, torch.Tensor]) -> None:
        sizes.append(sum(tensor.nbytes for tensor in shard.values()))
        write_shard(path, shard)

    monkeypatch.setattr("pipegrad.partition.hf.saved.write_shard", note)
    family = FAMILIES["mixtral"]
    model = family.model()
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    save_stages(tmp_path, model, {0: model}, max_shard_bytes=2 * layer)
    number = len(sizes)
    assert number > 1
    assert max(sizes) <= 2 * layer
    save_stages(tmp_path, model, {0: model}, max_shard_bytes=1)
    assert max(sizes[number:]) == layer


def test_an_older_model_is_replaced(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    old = family.model(seed=1)
    (tmp_path / "tokenizer.json").write_text("kept")
    for size in ("5GB", "20KB"):  # one file, which transformers prefers to an index; and many
        old.save_pretrained(tmp_path, max_shard_size=size)
        new = family.model(seed=2)
        save_stages(tmp_path, new, family.stages(new), tied=find_tied(new), max_shard_bytes=TWO)
        assert_same(tensors(type(new).from_pretrained(tmp_path)), tensors(new))
        shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert files(tmp_path) == sorted([*CONFIGS, *shards, INDEX, "tokenizer.json"])


def test_a_write_that_fails_leaves_the_older_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["llama"]
    old, new = family.model(seed=1), family.model(seed=2)
    old.save_pretrained(tmp_path)
    before = files(tmp_path)

    def full(path: Path, _: object) -> None:
        raise WeightsError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr("pipegrad.partition.hf.saved.write_shard", full)
    with pytest.raises(WeightsError, match=r"0.safetensors cannot be written: No space"):
        save_stages(tmp_path, new, family.stages(new), tied=find_tied(new))
    assert files(tmp_path) == before
    assert_same(tensors(type(old).from_pretrained(tmp_path)), tensors(old))


@pytest.mark.parametrize("moves", range(6))
def test_a_writer_that_ends_in_the_middle_leaves_no_half_of_a_model(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was moved: the new model is whole, or nothing is taken for one."""
    family = FAMILIES["llama"]
    old, new = family.model(seed=1), family.model(seed=2)
    save = partial(save_stages, tmp_path, tied=find_tied(old), max_shard_bytes=TWO)
    save(old, family.stages(old))
    replace, left = Path.replace, [moves]

    def end(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "the machine stopped", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", end)
    if moves < 5:  # 2 shards, 2 configurations, the index
        with pytest.raises(WeightsError, match="the machine stopped"):
            save(new, family.stages(new))
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            type(new).from_pretrained(tmp_path)
        with pytest.raises(WeightsError, match="the writer did not end"):
            Weights(tmp_path)
        monkeypatch.undo()
    save(new, family.stages(new))
    assert_same(tensors(type(new).from_pretrained(tmp_path)), tensors(new))


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = family.model()
    with pytest.raises(WeightsError, match="max_shard_bytes is 0, expected at least 1"):
        save_stages(tmp_path, model, {0: model}, max_shard_bytes=0)
    model.generation_config.temperature = 0.3
    with pytest.raises(WeightsError, match=r"(?s)generation_config cannot be saved: .*do_sample"):
        save_stages(tmp_path, model, {0: model})
    model.generation_config.temperature = None
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"file cannot be written: Not a directory"):
        save_stages(tmp_path / "file", model, {0: model})
    empty = meta_model(model.config, kind=type(model))
    with pytest.raises(WeightsError, match=r"lm_head.weight, .* have no values: load or start"):
        save_stages(tmp_path / "new", empty, {0: empty})
    assert not list((tmp_path / "new").iterdir())


# --- adapters of peft


# peft asks a model of transformers for a name that is deprecated there.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def adapter(kind: str, targets: list[str], **more: Any) -> Any:
    import peft

    if kind == "LoraConfig":
        more["r"] = 2
    if targets:
        more["target_modules"] = targets
    else:
        more |= {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    return getattr(peft, kind)(**more)


KINDS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "modules to save": ("LoraConfig", ["q_proj"], {"modules_to_save": ["lm_head", "norm"]}),
    "tokens of a tied embedding": ("LoraConfig", ["q_proj"], {"trainable_token_indices": [3, 5]}),
    "a tied embedding": ("LoraConfig", ["q_proj", "embed_tokens"], {}),
    "biases": ("LoraConfig", ["q_proj"], {"bias": "all", "use_dora": True}),
    "two adapters": ("LoraConfig", ["q_proj"], {}),
    "one layer": ("LoraConfig", ["q_proj"], {"layers_to_transform": [3]}),
    "vectors": ("IA3Config", ["k_proj", "down_proj"], {"feedforward_modules": ["down_proj"]}),
    "a buffer of all layers": ("VeraConfig", ["q_proj"], {"r": 2}),
    "indices that are computed": (
        "VBLoRAConfig",
        ["q_proj"],
        {"num_vectors": 8, "vector_length": 8, "save_only_topk_weights": True, "r": 2},
    ),
    "a prompt": ("PromptTuningConfig", [], {}),
    "the model inside": ("LoraConfig", ["q_proj"], {"modules_to_save": ["lm_head"]}),
    "a prompt that is computed": ("PromptEncoderConfig", [], {"encoder_hidden_size": 16}),
}


@peft_warns
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word")
@pytest.mark.parametrize("kind", KINDS)
def test_stages_save_what_peft_saves(kind: str, tmp_path: Path) -> None:
    import peft

    name, targets, more = KINDS[kind]
    torch.manual_seed(7)
    base = FAMILIES["llama"].model()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")  # is in the configuration
    model = peft.get_peft_model(base, adapter(name, targets, **more))
    if kind == "two adapters":
        model.add_adapter("other", adapter("LoraConfig", ["v_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "theirs")
    uncut = model.get_base_model() if kind == "the model inside" else model
    pipegrad.cut(uncut, num_stages=3).save_pretrained(tmp_path / "ours")
    folders = tmp_path / "ours", tmp_path / "theirs"
    ours, theirs = (
        {str(p.relative_to(f)): load_file(p) for p in f.rglob("*.safetensors")} for f in folders
    )
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(model.peft_config)
    for file, tensors_of_file in theirs.items():
        assert_same(ours[file], tensors_of_file)
    ours, theirs = (
        {str(p.relative_to(f)): json.loads(p.read_text()) for p in f.rglob("*.json")}
        for f in folders
    )
    assert ours == theirs


@peft_warns
def test_an_adapter_that_cannot_be_saved_is_refused_at_the_cut() -> None:
    import peft

    tokens = {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}
    config = peft.CPTConfig(task_type="CAUSAL_LM", **tokens)
    model = peft.get_peft_model(FAMILIES["llama"].model(), config)
    with pytest.raises(WeightsError, match=r"'default' \(CPTConfig\) from stages, .* on values"):
        pipegrad.cut(model, num_stages=2)

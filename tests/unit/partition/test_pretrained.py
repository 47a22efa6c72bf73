"""Stages get the tensors of a directory, or initial values that no cut can change."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad.errors import ConfigError, WeightsError
from pipegrad.partition.hf.files import INDEX, SINGLE, Weights, write_shard
from pipegrad.partition.hf.initial_values import _SeedByName
from pipegrad.partition.hf.pretrained import (
    first_names,
    load_stages,
    meta_model,
)
from pipegrad.partition.hf.saved import save_stages
from tests.support.partition.hand_cut import FAMILIES, assert_same, joined, tensors


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_have_the_tensors_of_from_pretrained(name: str, shard: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    saved = family.model()
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "20KB")
    model = meta_model(tmp_path)
    stages = family.stages(model, 3)

    for stage in stages.values():  # as ranks do it
        load_stages(tmp_path, model, [stage])

    assert all(tensor.is_meta for tensor in tensors(model).values())  # stages are copies
    assert_same(joined(list(stages.values())), tensors(type(saved).from_pretrained(tmp_path)))


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_a_tied_parameter_is_one_on_a_rank(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.model().save_pretrained(tmp_path)
    model = meta_model(tmp_path)
    stages = family.stages(model, 2)
    load_stages(tmp_path, model, stages.values())

    names = dict[int, set[str]]()
    for stage in stages.values():
        for full, parameter in stage.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(full)
    expected = dict[int, set[str]]()
    for full, parameter in model.named_parameters(remove_duplicate=False):
        expected.setdefault(id(parameter), set()).add(full)
    assert sorted(map(sorted, names.values())) == sorted(map(sorted, expected.values()))


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    saved = family.model()
    saved.save_pretrained(tmp_path)
    weights = Weights(tmp_path)
    stored = {name: weights.read(name) for name in weights.files}
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_shard(tmp_path / SINGLE, stored)

    model = meta_model(tmp_path)
    stages = family.stages(model)
    load_stages(tmp_path, model, stages.values())
    assert_same(joined(list(stages.values())), tensors(saved))

    # Two copies that differ: transformers does not tie them, and only warns.
    stored["model.embed_tokens.weight"] = stored["lm_head.weight"] + 1
    write_shard(tmp_path / SINGLE, stored)
    with pytest.raises(WeightsError, match=r"different values .* tie_word_embeddings to false"):
        load_stages(tmp_path, model, family.stages(model).values())


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32, None])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_dtypes_are_those_of_from_pretrained(
    name: str, wanted: torch.dtype | None, tmp_path: Path
) -> None:
    """T5 keeps a part of float16 models in float32."""
    family = FAMILIES[name]
    saved = family.model(dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = meta_model(tmp_path, dtype=wanted)
    load_stages(tmp_path, model, [model])
    assert_same(
        tensors(model), tensors(type(saved).from_pretrained(tmp_path, dtype=wanted or "auto"))
    )


def test_old_names_are_read(tmp_path: Path) -> None:
    """Models of 2019 have gamma and beta; a model without a head has no prefix."""
    import transformers

    family = FAMILIES["bert"]
    saved = family.model()
    saved.save_pretrained(tmp_path)
    weights = Weights(tmp_path)
    stored = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): (weights.read(name))
        for name in weights.files
    }
    write_shard(tmp_path / SINGLE, stored)
    model = meta_model(tmp_path)
    load_stages(tmp_path, model, [model])
    assert_same(tensors(model), tensors(saved))

    llama = FAMILIES["llama"].model()
    llama.model.save_pretrained(tmp_path / "base")
    model = meta_model(tmp_path / "base", kind=transformers.AutoModelForCausalLM)
    load_stages(tmp_path / "base", model, [model])
    assert_same(tensors(model), tensors(llama))


def test_a_new_head_is_started_if_a_seed_is_given(tmp_path: Path) -> None:
    import transformers

    FAMILIES["llama"].model().save_pretrained(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    model = meta_model(tmp_path, kind=kind)
    with pytest.raises(WeightsError, match=r"has no values for score.weight.*With a seed"):
        load_stages(tmp_path, model, [model])
    load_stages(tmp_path, model, [model], seed=3)
    head = model.score.weight.detach().clone()
    assert 0.005 < head.std() < 0.05

    expected = tensors(kind.from_pretrained(tmp_path))
    assert_same(tensors(model) | {"score.weight": expected["score.weight"]}, expected)
    again = meta_model(tmp_path, kind=kind)
    load_stages(tmp_path, again, [again], seed=4)
    assert not torch.equal(again.score.weight, head)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_initial_values_do_not_depend_on_the_cut(name: str, num_stages: int) -> None:
    family = FAMILIES[name]
    config = family.model().config
    kind = getattr(__import__("transformers"), family.kind)
    whole = meta_model(config, kind=kind)
    load_stages(None, whole, [whole], seed=5)

    model = meta_model(config, kind=kind)
    stages = list(family.stages(model, num_stages).values())
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for stage in random.Random(0).sample(stages, len(stages)):
        load_stages(None, model, [stage], seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(joined(stages), tensors(whole))


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_values_have_the_distributions_of_transformers(name: str) -> None:
    """Constants are the same; of n drawn numbers the standard deviation is within 6 / sqrt(2 n)."""
    family = FAMILIES[name]
    theirs = family.model()
    model = meta_model(theirs.config, kind=type(theirs))
    load_stages(None, model, [model], seed=5)
    expected = tensors(theirs)
    assert {n: t.shape for n, t in tensors(model).items()} == {
        n: t.shape for n, t in expected.items()
    }
    for key, value in tensors(model).items():
        if not value.is_floating_point() or expected[key].std(correction=0) == 0 or "inv" in key:
            assert torch.equal(value, expected[key]), key
            continue
        spread = value.double().std() / expected[key].double().std()
        assert abs(spread - 1) < 6 * (2 / value.numel()) ** 0.5, key
        assert abs(value.mean()) < 6 * value.std() / value.numel() ** 0.5, key
    drawn = [p for p in model.parameters() if p.ndim == 2]
    assert len({float(p.detach()[0, 0]) for p in drawn}) == len(drawn)  # no seed twice


def test_initial_values_depend_on_the_seed_and_the_padding_row_stays_zero() -> None:
    """The head of a tied embedding would draw numbers there, if both initialised the one tensor."""
    theirs = FAMILIES["llama"].model(pad_token_id=3)
    models = [meta_model(theirs.config, kind=type(theirs)) for _ in range(2)]
    for seed, model in enumerate(models):
        load_stages(None, model, [model], seed=seed)
        assert not model.lm_head.weight[3].any()
        assert model.lm_head.weight[2].all()
    assert not torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)


def test_draws_by_other_modules_do_not_depend_on_the_cut() -> None:
    """ImageGPT's outermost module draws weights of all layers; an orthogonal one is temporary."""

    class Odd(type(FAMILIES["gpt2"].model())):  # type: ignore[misc]
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            for name, parameter in module.named_parameters():
                if module is self and name.endswith("c_proj.weight"):
                    parameter.data.normal_(0, 0.1)

    class Orthogonal(type(FAMILIES["llama"].model())):  # type: ignore[misc]
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)

    class Truncated(type(FAMILIES["llama"].model())):  # type: ignore[misc]
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):  # as often as values ask for, and never without
                nn.init.trunc_normal_(module.weight)
            else:
                super()._init_weights(module)

    wholes = []
    for name, kind in (("gpt2", Odd), ("llama", Orthogonal), ("llama", Truncated)):
        family = FAMILIES[name]
        config = family.model(tie_word_embeddings=name == "gpt2").config
        whole, model = meta_model(config, kind=kind), meta_model(config, kind=kind)
        load_stages(None, whole, [whole], seed=5)
        stages = list(family.stages(model, 3).values())
        for stage in stages:
            load_stages(None, model, [stage], seed=5)
        assert_same(joined(stages), tensors(whole))
        wholes.append(whole)
    assert wholes[0].transformer.h[2].mlp.c_proj.weight.std() > 0.08
    head = wholes[1].lm_head.weight
    assert torch.allclose(head.T @ head, torch.eye(32), atol=1e-5)


def test_a_model_that_leaves_a_tensor_out_is_refused() -> None:
    class Lazy(type(FAMILIES["gpt2"].model())):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra_scale = nn.Parameter(torch.ones(3))
            self.register_buffer("extra_count", torch.tensor(3))
            self.register_buffer("bounds", torch.zeros(2))

        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if module is self:  # their sum is nan
                self.bounds.copy_(torch.tensor([-torch.inf, torch.inf]))

    model = meta_model(FAMILIES["gpt2"].model().config, kind=Lazy)
    with pytest.raises(WeightsError, match="does not initialise extra_count, extra_scale by its"):
        load_stages(None, model, [model], seed=0)


def test_a_parameter_that_is_made_on_the_cpu_is_read_too(tmp_path: Path) -> None:
    """Wav2Vec2 has one: torch.Tensor(size) heeds no device. Its own values were kept."""

    class Legacy(type(FAMILIES["gpt2"].model())):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.mask = nn.Parameter(torch.Tensor(8).uniform_())
            self.other = self.mask
            self.register_buffer("table", torch.ones(3, device="cpu"), persistent=False)

    config = FAMILIES["gpt2"].model().config
    saved = Legacy(config)
    save_stages(tmp_path, saved, {0: saved})
    model = meta_model(tmp_path, kind=Legacy)
    assert model.mask.is_meta
    assert model.other is model.mask
    load_stages(tmp_path, model, [model])
    assert_same(tensors(model), tensors(saved))


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    for fill in ("load", "start"):
        model = meta_model(tmp_path)
        model.model.embed_tokens.requires_grad_(False)
        if fill == "load":
            load_stages(tmp_path, model, [model])
        else:
            load_stages(None, model, [model], seed=0)
        assert not model.lm_head.weight.requires_grad
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.model.norm.weight.requires_grad


def test_a_model_without_memory_is_in_training_mode_with_its_generation_config(
    tmp_path: Path,
) -> None:
    saved = FAMILIES["llama"].model()
    saved.generation_config.max_new_tokens = 17
    saved.save_pretrained(tmp_path)
    model = meta_model(tmp_path)
    assert model.training
    assert model.generation_config.max_new_tokens == 17
    assert all(tensor.is_meta for tensor in tensors(model).values())
    assert type(meta_model(tmp_path / "config.json")) is type(saved)
    assert model.config is not meta_model(model.config).config
    # A directory without a dtype has that of its tensors.
    FAMILIES["gpt2"].model(dtype=torch.bfloat16).save_pretrained(tmp_path / "low")
    path = tmp_path / "low" / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config))
    assert meta_model(path.parent).dtype == torch.bfloat16


# --- what is refused


def write_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_code_of_a_directory_runs_if_it_is_trusted_and_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(tmp_path / "c")
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    code, file = tmp_path / "own.py", tmp_path / "config.json"
    code.write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads(file.read_text()) | {"architectures": ["Own"], "model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="contains custom code"):
        meta_model(tmp_path)
    for kind in (None, transformers.AutoModelForCausalLM):  # the second time of what was saved
        model = meta_model(tmp_path, kind=kind, trust_remote_code=True)
        assert type(model).__name__ == "Own"
        stages = FAMILIES["llama"].stages(model, 2)
        load_stages(tmp_path, model, stages.values())
        code.unlink()
        save_stages(tmp_path, model, stages)
    file.write_text(file.read_text().replace('"own.Own"', '"someone/else--own.Own"'))
    with pytest.raises(ConfigError, match="nothing is downloaded"):
        meta_model(tmp_path, trust_remote_code=True)


def test_configurations_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    with pytest.raises(WeightsError, match=r"no gpt2: expected a directory"):
        meta_model("gpt2")
    with pytest.raises(ConfigError, match=r"a LlamaConfig: architectures is \[\].*AutoModel"):
        meta_model(LlamaConfig())
    with pytest.raises(ConfigError, match="expected a class of models"):
        meta_model(LlamaConfig(), kind=LlamaConfig)
    with pytest.raises(ConfigError, match="dtype is 'bfloat16', expected one of torch's"):
        meta_model(LlamaConfig(architectures=["LlamaForCausalLM"]), dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a dict is no directory"):
        meta_model({"model_type": "llama"})
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    write_config(tmp_path, architectures=["LlamaForCasualLM"])
    with pytest.raises(ConfigError, match="LlamaForCasualLM"):
        meta_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    write_config(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        meta_model(tmp_path)
    write_config(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantized"):
        meta_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is no configuration"):
        meta_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "llama",
            {"intermediate_size": 64},
            r"model.safetensors: \S+ has shape \(.*of the model",
        ),
        ("llama", {"num_hidden_layers": 5}, "no values for model.layers.4.*and 5 more of Llama"),
        (
            "mixtral",
            {"num_local_experts": 3},
            r"has shape \(.*expected \(|and model\S+ of the model",
        ),
        ("mixtral", {}, "experts"),  # one of them is lost
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_read(
    name: str, changes: dict[str, int], words: str, tmp_path: Path
) -> None:
    FAMILIES[name].model().save_pretrained(tmp_path)
    write_config(tmp_path, **changes)
    if not changes:
        weights = Weights(tmp_path)
        stored = {n: weights.read(n) for n in weights.files if "experts.2.w1" not in n}
        write_shard(tmp_path / SINGLE, stored)
    model = meta_model(tmp_path)
    with pytest.raises(WeightsError, match=words):
        load_stages(tmp_path, model, [model])
    assert name == "mixtral" or all(parameter.is_meta for parameter in model.parameters())


def test_a_stage_with_other_names_is_refused(tmp_path: Path) -> None:
    FAMILIES["llama"].model().save_pretrained(tmp_path)
    model = meta_model(tmp_path)
    with pytest.raises(WeightsError, match=r"the uncut model has no inner\.lm_head\.weight, inner"):
        load_stages(tmp_path, model, [nn.ModuleDict({"inner": model})])


# --- memory

PEAK = """
import sys, torch
from pathlib import Path
from pipegrad.partition.hf.pretrained import load_stages, meta_model
from tests.support.partition.hand_cut import FAMILIES

def peak():
    lines = open("/proc/self/status")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

model = meta_model(sys.argv[1])
stage = FAMILIES["llama"].stages(model, 4)[1]
before = peak()
load_stages(sys.argv[1], model, [stage])
held = sum(p.nbytes for p in stage.parameters())
assert not any(p.is_meta for p in stage.parameters())
print(held, (peak() - before) * 1024)
"""


def test_the_host_has_memory_for_a_stage_and_a_file(tmp_path: Path) -> None:
    """230 MB, 8 layers, 4 stages: a stage has 2 layers of 28 MB, and a file has one layer."""
    family = FAMILIES["llama"]
    wide = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    small = family.model(num_hidden_layers=1)
    wide |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 96}
    model = meta_model(type(small.config)(**family.config | wide), kind=type(small))
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="34MB")
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert sum(sizes) > 220e6
    out = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path], check=True, capture_output=True, text=True
    ).stdout.split()
    held, more = map(int, out)
    assert held > 0.2 * sum(sizes)
    # 10 MB: what Python and transformers import and keep while they load.
    assert more < held + max(sizes) + 10e6


def test_each_draw_of_a_module_has_numbers_of_its_own_and_the_same_again() -> None:
    def draws() -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]), _SeedByName(1, nn.Linear(2, 2)):
            return [torch.rand(3), torch.rand(3)]

    first, second = draws()
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack(draws()), torch.stack([first, second]))


def test_a_buffer_of_two_modules_is_saved_under_its_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    table = torch.ones(2)
    for module in model.values():
        module.register_buffer("table", table)
    assert first_names(model) == {"a.table": "a.table", "b.table": "a.table"}

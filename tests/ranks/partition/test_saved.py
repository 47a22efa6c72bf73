"""Ranks load, start and save their stages together, and one rank's error is everyone's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipegrad import find_tied
from pipegrad.errors import WeightsError
from pipegrad.partition.weights.files import INDEX, write_shard
from pipegrad.partition.weights.pretrained import load_stages, meta_model, start_stages
from pipegrad.partition.weights.saved import save_stages
from pipegrad.testing import run_ranks
from tests.support.partition.hand_cut import FAMILIES, assert_same, tensors

NAMES = ["llama", "t5", "mixtral"]
PIPELINE, DATA = 2, 2


@contextlib.contextmanager
def error() -> Iterator[list[str]]:
    """Notes how the body fails."""
    found = list[str]()
    try:
        yield found
    except Exception as caught:  # noqa: BLE001 - whatever it is, is asserted
        found.append(f"{type(caught).__name__}: {caught}")


def own_stages(name: str, model: nn.Module, mesh: DeviceMesh) -> dict[int, nn.Module]:
    """Returns the stages of this rank: a V of four, so the first pipeline rank has both ends."""
    stages = FAMILIES[name].stages(model, 2 * PIPELINE)
    at = mesh["pp"].get_local_rank()
    return {index: stages[index] for index in (at, 2 * PIPELINE - 1 - at)}


def sharded(stages: dict[int, nn.Module], mesh: DeviceMesh) -> None:
    """Shards the layers of the stages by FSDP2 over the data ranks, and the rest of each stage."""
    for stage in stages.values():
        for module in [
            m for m in stage.modules() if type(m).__name__.endswith(("DecoderLayer", "T5Block"))
        ]:
            fully_shard(module, mesh=mesh["dp"])


def load_and_save(folder: Path) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))
    for name in NAMES:
        for way in ("plain", "fsdp"):
            model = meta_model(folder / name)
            ties = find_tied(model)
            stages = own_stages(name, model, mesh)
            load_stages(folder / name, model, stages.values())
            if way == "fsdp":
                sharded(stages, mesh)
            save_stages(folder / f"{name}-{way}", model, stages, tied=ties)

    name = "llama"
    model = meta_model(folder / name)
    stages = own_stages(name, model, mesh)
    torch.manual_seed(dist.get_rank())
    start_stages(model, stages.values(), seed=3)
    save_stages(folder / "started", model, stages, tied=find_tied(model))
    return mistakes(folder, mesh)


def mistakes(folder: Path, mesh: DeviceMesh) -> list[list[str]]:
    """Returns how each mistake of one rank ends on this rank."""
    rank, found = dist.get_rank(), []

    def fail(path: Path, shard: dict[str, torch.Tensor]) -> None:
        if (rank == 1 and path.name == "0-0.safetensors") or rank == 2:
            raise WeightsError(f"{path} cannot be written: No space left on device")
        write_shard(path, shard)

    def attempt(function: Callable[[], object]) -> None:
        with error() as caught:
            function()
        found.append(caught)

    model = meta_model(folder / "llama")
    stages = own_stages("llama", model, mesh)
    lost = folder / "elsewhere" if rank == 3 else folder / "llama"
    attempt(lambda: meta_model(lost))
    attempt(lambda: meta_model(folder / NAMES[rank % 2]))
    attempt(lambda: load_stages(lost, model, stages.values()))
    attempt(lambda: start_stages(model, own_stages("llama", model, mesh).values(), seed=rank))
    attempt(lambda: save_stages(folder / "empty", model, stages))
    load_stages(folder / "llama", model, stages.values())
    sharded(stages, mesh)  # a rank that fails must not leave the others in a gather
    with patch("pipegrad.partition.weights.saved.write_shard", fail):
        attempt(lambda: save_stages(folder / "llama-fsdp", model, stages))
    return found


def test_four_ranks_load_and_save_or_all_of_them_fail(tmp_path: Path) -> None:
    import transformers

    models = {name: FAMILIES[name].model() for name in NAMES}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    ranks = run_ranks(load_and_save, PIPELINE * DATA, tmp_path)

    for name, model in models.items():
        for way in ("plain", "fsdp"):
            loaded = type(model).from_pretrained(tmp_path / f"{name}-{way}")
            assert_same(tensors(loaded), tensors(model))
            files = json.loads((tmp_path / f"{name}-{way}" / INDEX).read_text())["weight_map"]
            assert len(set(files.values())) == 2 * PIPELINE
    started = meta_model(tmp_path / "llama")
    start_stages(started, [started], seed=3)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "started")
    assert_same(tensors(loaded), tensors(started))

    expected = [
        ["1 of 4 ranks failed", "rank 3: WeightsError: there is no", "elsewhere"],
        ["disagree on the configuration of the model", "[0, 2]: LlamaFor", "[1, 3]: T5For"],
        ["1 of 4 ranks failed", "rank 3: WeightsError: there is no directory", "elsewhere"],
        ["disagree on the seed of the stages", "ranks [3]: 3"],
        ["1 of 4 ranks failed", "rank 3: WeightsError", "have no values: load or start it first"],
        ["rank 2: WeightsError", "-0.safetensors cannot be written: No space left on device"],
    ]
    for found in ranks:
        assert len(found) == len(expected)
        for words, caught in zip(expected, found, strict=True):
            assert len(caught) == 1
            assert caught[0].startswith("AgreementError: ")
            assert [word for word in words if word not in caught[0]] == []
    assert len({str(found) for found in ranks}) == 1
    assert not (tmp_path / "empty" / ".pipegrad-part").exists()


@pytest.mark.parametrize("file", [INDEX, "model.safetensors"])
def test_one_process_without_a_group_needs_no_ranks(tmp_path: Path, file: str) -> None:
    """The same functions, for who has one process."""
    model = FAMILIES["llama"].model()
    if file == INDEX:
        save_stages(tmp_path, model, {0: model}, tied=find_tied(model))
    else:
        model.save_pretrained(tmp_path)
    assert (tmp_path / file).exists()
    loaded = meta_model(tmp_path)
    load_stages(tmp_path, loaded, [loaded])
    assert_same(tensors(loaded), tensors(model))

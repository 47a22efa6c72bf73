"""Ranks load, start and save their stages together, and one rank's error is everyone's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipegrad import find_tied
from pipegrad.errors import AgreementError, WeightsError
from pipegrad.partition.hf.files import INDEX
from pipegrad.partition.hf.pretrained import load_stages, meta_model
from pipegrad.partition.hf.saved import save_stages
from tests.support.gradients.cases import rank
from tests.support.partition.hand_cut import FAMILIES, assert_same, tensors
from tests.support.ranked import gathered

PIPELINE, DATA = 2, 2


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


@pytest.mark.ranks(PIPELINE * DATA, seconds=300)
@pytest.mark.parametrize(
    ("name", "way"), [("llama", "plain"), ("t5", "plain"), ("t5", "fsdp"), ("mixtral", "fsdp")]
)
def test_ranks_load_and_save_what_transformers_reads(name: str, way: str, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))
    true = FAMILIES[name].model()
    if rank() == 0:
        true.save_pretrained(tmp_path)
    dist.barrier()
    model, saved = meta_model(tmp_path), tmp_path / "saved"
    ties = find_tied(model)
    stages = own_stages(name, model, mesh)
    load_stages(tmp_path, model, stages.values())
    if way == "fsdp":
        sharded(stages, mesh)
    save_stages(saved, model, stages, tied=ties)
    if rank() == 0:
        assert_same(tensors(type(true).from_pretrained(saved)), tensors(true))
        files = json.loads((saved / INDEX).read_text())["weight_map"]
        assert {*files.values()} == {"model-00001-of-00001.safetensors"}


@pytest.mark.ranks(PIPELINE * DATA, seconds=300)
def test_a_mistake_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))
    names = "llama", "t5"
    if rank() == 0:
        for name in names:
            FAMILIES[name].model().save_pretrained(tmp_path / name)
    dist.barrier()

    def fail(path: Path, _: object) -> None:
        raise WeightsError(f"{path} cannot be written: No space left on device")

    def fails(function: Callable[[], object], *words: str) -> None:
        with pytest.raises(AgreementError) as caught:
            function()
        assert [word for word in words if word not in str(caught.value)] == []
        assert len(set(gathered(str(caught.value)))) == 1

    whole = tmp_path / "llama"
    model = meta_model(whole)
    stages = own_stages("llama", model, mesh)
    lost = tmp_path / "elsewhere" if rank() == 3 else whole
    one_failed = "1 of 4 ranks failed"
    fails(lambda: meta_model(lost), one_failed, "rank 3: WeightsError: there is no", "elsewhere")
    fails(
        lambda: meta_model(tmp_path / names[rank() % 2]),
        "disagree on the configuration of the model",
        *("LlamaFor", "on ranks [0, 2], T5For", "on ranks [1, 3]"),
    )
    fails(
        lambda: load_stages(lost, model, stages.values()),
        *(one_failed, "rank 3: WeightsError: there is no directory", "elsewhere"),
    )
    fails(
        lambda: load_stages(None, model, own_stages("llama", model, mesh).values(), seed=rank()),
        *("disagree on the seed of the stages", "3 on rank 3"),
    )
    fails(
        lambda: save_stages(tmp_path / "empty", model, stages),
        *(one_failed, "rank 3: WeightsError", "have no values: load or start it first"),
    )
    assert not (tmp_path / "empty" / ".pipegrad-part").exists()
    load_stages(whole, model, stages.values())
    sharded(stages, mesh)  # a rank that fails must not leave the others in a gather
    with patch("pipegrad.partition.hf.saved.write_shard", fail):
        fails(
            lambda: save_stages(whole, model, stages),
            *("rank 0: WeightsError", "/0.safetensors cannot be written: No space left on device"),
        )

"""Ranks need not have the same PYTHONHASHSEED: no plan depends on the order of a set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipegrad import Topology, find_tied, make_manifest, make_plan
from pipegrad.plan.options import GradientOptions
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import stage_module


def plans() -> str:
    """Returns the plans of all ranks, made offline, and their digests."""
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)))
    model = build("crossed")
    stages = {stage: stage_module(model, stage, 4) for stage in range(4)}
    manifest = make_manifest(stages, topology, tied=find_tied(model))
    handlers = [("pipeline-shared", PipelineShared()), ("data-parallel", DataParallel())]
    made = [
        make_plan(
            manifest,
            topology.at(rank),
            handlers,
            GradientOptions(bucket_bytes=1024, comm_streams=3),
        )
        for rank in topology.ranks
    ]
    assert len({plan.digest for plan in made}) == 1
    return "\n".join([made[0].digest, *map(str, made)])


@pytest.mark.slow
def test_plans_and_digests_are_the_same_under_any_hash_seed() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4242")
    ]
    said = [process.communicate(timeout=300)[0] for process in running]

    assert said[0].count("launch") == 8
    assert said == [f"{plans()}\n"] * 2


if __name__ == "__main__":
    print(plans())  # noqa: T201 - to the test

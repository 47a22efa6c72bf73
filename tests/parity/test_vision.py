"""Vision-language models, cut and trained with batches of uneven images, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.pairwise import everything
from tests.support.partition.twins import Twins, difference
from tests.support.partition.vision import VISION, example, seen

pytest.importorskip("transformers")

SECONDS = 400.0  # the first case of a world imports transformers, in each rank
MOST = 1e-6  # losses of transformers compute in float32, whatever the dtype of the model
WAYS = [*itertools.product((2, 4), ("1f1b", "zb-h1"))]


# Several outputs of a tower, images and videos, tiles, zeros where images lack, sounds.
KINDS = ("Qwen3-VL", "Qwen2.5-VL, videos", "LLaVA-Next", "Idefics3", "Qwen2-Audio")


def cases() -> Iterator[Any]:
    for at, family in enumerate(KINDS):
        for num_ranks, schedule in WAYS if everything() else [WAYS[at % len(WAYS)]]:
            marks = pytest.mark.ranks(num_ranks, seconds=SECONDS)
            yield pytest.param(family, num_ranks, schedule, marks=marks)


@pytest.mark.parametrize(("name", "num_ranks", "schedule"), [*cases()])
def test_losses_and_gradients_of_uneven_images_are_those_of_one_process(
    name: str, num_ranks: int, schedule: str
) -> None:
    family = VISION[name]
    options = {"example": example(family)}
    twins = Twins(family.build, num_ranks, schedule=schedule, cut=options)
    for seed in (100, 101):  # one microbatch of four has no image
        twins.step(family.batch(seed))
    batch = family.batch(102)
    twins.step({name: x for name, x in batch.items() if name not in seen(batch)})

    found = twins.scheduler.evaluate(batch).loss
    with torch.no_grad():
        true = twins.true.eval()(**batch).loss
    assert difference(found, true) / abs(true.item()) <= MOST
    assert max(twins.close()) <= MOST


@pytest.mark.ranks(2, seconds=SECONDS)
@pytest.mark.parametrize("axes", [3, 4])  # the first of four is of the text alone
def test_positions_on_as_many_axes_as_there_are_rows_are_cut_by_samples(axes: int) -> None:
    """The first dimension was cut, whose size was that of the samples by chance."""
    family = VISION["Qwen2.5-VL"]
    options = {"num_microbatches": 2, "cut": {"example": example(family)}}
    twins = Twins(family.build, 2, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 50, (axes, 9), generator=generator)
    for rows in (axes, 1):  # positions of one row are those of all
        positions = torch.randint(9, (axes, rows, 9), generator=generator).sort().values
        batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
        twins.step(batch | {"use_cache": False})  # as in a pipeline: a mask depends on it
    assert max(twins.close()) <= MOST

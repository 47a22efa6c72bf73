"""A summary of one replica says of all ranks what the plans of all ranks say."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipegrad.errors import ConfigError
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.train.config import load
from pipegrad.train.job import Job
from pipegrad.train.rendering import ranks_in_words
from pipegrad.train.summary import make_summary, spans, summarize_rank

TIED_GPT = Path(__file__).parents[3] / "examples" / "tied_gpt.toml"
SHARED = "{name='pipeline-shared', placement='owner'}"


def job(num_ranks: int, *settings: str) -> Job:
    small = ("model.width=8", "model.layers=2", "data.batch_size=96")
    return Job(load(TIED_GPT, [*small, *settings]), num_ranks)


def handlers(*names: str) -> str:
    return f"gradient_handlers=[{', '.join(names)}]"


PIPE, DP = "'pipeline-shared'", "'data-parallel'"
OUTER = "{name='sharded', axis='dp'}, {name='data-parallel', axis='outer'}"
EXPERTS = "{name='expert-parallel', experts=['*.bias'], placement='shard'}"
CASES = {
    "alone": (1, ()),
    "a tie and replicas": (6, ("parallel.pipeline=3",)),
    "owners": (6, ("parallel.pipeline=3", handlers(SHARED, DP))),
    "shards": (8, ("parallel.pipeline=4", handlers(PIPE, "'sharded'"))),
    "owners of shards": (8, ("parallel.pipeline=4", handlers(SHARED, "'sharded'"))),
    "shards, averaged": (
        16,
        (
            "parallel={pipeline=4, dimensions={outer=2}, data_dimensions=['dp', 'outer']}",
            handlers(PIPE, OUTER),
        ),
    ),
    "experts": (
        8,
        (
            "parallel={pipeline=2, dimensions={ep=2}, data_dimensions=['dp', 'ep']}",
            handlers(PIPE, EXPERTS),
        ),
    ),
    "two stages a rank": (4, ("parallel.pipeline=2", "parallel.schedule='zbv'")),
    "several buckets": (8, ("parallel.pipeline=4", "gradients.bucket_bytes=1000")),
}


def summarized(made: Job, costs: Costs | None = None) -> dict[str, Any]:
    cut = made.cut(made.model("meta"))
    return make_summary(made, cut, made.manifest(cut), costs)


@pytest.mark.parametrize("name", CASES)
def test_the_sums_are_those_of_the_plans_of_all_ranks(name: str) -> None:
    made = job(CASES[name][0], *CASES[name][1])
    summary = summarized(made)
    plans = made.plans(made.manifest(made.cut(made.model("meta"))))
    assert len(plans) == made.num_ranks
    assert summary["collectives"] == sum(len(plan.launches) for plan in plans.values())
    assert summary["reduced_bytes"] == sum(plan.reduced_bytes for plan in plans.values())
    of_rank = {
        rank: row
        for row in summary["pipeline_ranks"]
        for first, last, step in row["ranks"]
        for rank in range(first, last + 1, step)
    }
    assert sorted(of_rank) == list(plans)
    for rank, plan in plans.items():
        assert of_rank[rank]["stages"] == list(made.topology(rank).local_stages)
        assert [bucket["parameters"] for bucket in of_rank[rank]["plan"]["buckets"]] == [
            [slot.key for slot in bucket.slots] for bucket in plan.buckets
        ]
    json.dumps(summary, allow_nan=False)


def test_the_bubble_of_1f1b_is_the_known_one() -> None:
    made = job(4, "parallel.pipeline=4", "parallel.microbatches=6")
    summary = summarized(made)
    assert summary["schedule"]["step_time"] == (6 + 3) * 3
    assert [r["bubble"] for r in summary["pipeline_ranks"]] == pytest.approx([3 / 9] * 4)
    assert [r["live_activations"] for r in summary["pipeline_ranks"]] == [4, 3, 2, 1]
    assert {(link["messages"], link["bytes"]) for link in summary["links"]} == {(6, None)}
    # All that the page promises is there.
    keys = set(re.findall(r'"(\w+)":', json.dumps(summary)))
    page = (TIED_GPT.parents[1] / "docs" / "trainer.md").read_text()
    promised = page.partition("| Key | Contents")[2].partition("\n\n")[0]
    assert {"ranks", "launches"} <= set(re.findall(r"`(\w+)`", promised)) <= keys
    # Costs give seconds, memory and bytes.
    stage = StageCosts(1.0, 2.0, activation_bytes=100, outputs={"x": 7})
    summary = summarized(job(2, "parallel.pipeline=2"), Costs((stage, stage)))
    assert (summary["schedule"]["time_unit"], summary["schedule"]["step_time"]) == ("seconds", 15.0)
    assert [link["bytes"] for link in summary["links"]] == [4 * 7, 4 * 7]
    chunks = "parallel={pipeline=2, schedule={name='chunked-1f1b', chunks=7}}"
    chunked = summarized(job(2, chunks), Costs((stage, stage)))
    assert [rank["bubble"] for rank in chunked["pipeline_ranks"]] == pytest.approx([1 / 29] * 2)
    assert [link["bytes"] for link in chunked["links"]] == [4 * 7, 4 * 7]
    # Rank 0 holds two microbatches, rank 1 one, and each what it has received.
    assert min(summary["schedule"]["peak_bytes"]) >= 100


@pytest.mark.parametrize(
    ("handler", "optimizer", "message"),
    [
        ("owned", "others='Adafactor'", "others.name = 'Adafactor': Adafactor cannot step sharded"),
        ("owned", "others='Muon'", r"others.name = 'Muon': Muon .* Muon is given as others, which"),
        (
            "data-parallel",
            "name='AdamW', others='Muon'",
            r"others.name = 'Muon': Muon steps .* is \(.*: Muon is given as others",
        ),
        (
            "data-parallel",
            "name='Muon'",
            r"optimizer.name = 'Muon': Muon steps .* let another optimizer step what is no matrix",
        ),
        ("sharded", "others='AdamW'", "optimizer.name = 'Muon': Muon cannot step sharded param"),
    ],
)
def test_the_part_of_an_optimizer_that_does_not_fit_is_named(
    handler: str, optimizer: str, message: str
) -> None:
    """Every error named optimizer.name, also those of optimizer.others."""
    optimizer = optimizer if optimizer.startswith("name") else f"name='Muon', {optimizer}"
    chosen = [handlers(PIPE, f"'{handler}'"), f"optimizer={{{optimizer}}}"]
    made = job(2, "parallel.pipeline=1", *chosen)
    manifest = made.manifest(made.cut(made.model("meta")))
    with pytest.raises(ConfigError, match=rf"optimizer\.{message.removeprefix('optimizer.')}"):
        made.plans(manifest)


def test_others_of_a_model_without_matrices_are_named() -> None:
    made = job(1, "optimizer={name='Muon', others='AdamW'}")
    manifest = made.manifest(made.cut(made.model("meta")))
    [stage] = manifest.stages
    vectors = tuple(entry for entry in stage if len(entry.shape) < 2)
    no_matrix = dataclasses.replace(manifest, stages=(vectors,), ties=())
    with pytest.raises(ConfigError, match=r"optimizer.others = 'AdamW': .*: leave others out"):
        made.plans(no_matrix)


def test_a_rank_is_told_in_full() -> None:
    made = job(4, "parallel.pipeline=2")
    manifest = made.manifest(made.cut(made.model("meta")))
    told = summarize_rank(made, manifest, 3)
    assert (told["rank"], told["pipeline_rank"]) == (3, 1)
    computed = [line.split()[1] for line in told["program"] if line.split()[0] == "compute"]
    assert computed == [str(action) for action in made.schedule.actions[1]]
    assert {line.split()[0] for line in told["program"]} >= {"send", "wait-receive", "release"}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([7], "7"),
        (range(0, 4096, 16), "0-4080:16"),
        ([0, 3840], "0, 3840"),
        ([0, 1, 8, 9], "0-1, 8-9"),
    ],
)
def test_spans(ranks: list[int], text: str) -> None:
    assert ranks_in_words(spans(ranks)) == text
    expanded = [r for first, last, step in spans(ranks) for r in range(first, last + 1, step)]
    assert expanded == list(ranks)

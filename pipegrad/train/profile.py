"""profile_job: what the stages of a job take on this machine, one after the other."""

from __future__ import annotations

from pipegrad.observe.offline import profile_stages
from pipegrad.pipeline.loss import TOKEN_MEAN
from pipegrad.simulation.costs import StageCosts
from pipegrad.train.data.corpus import tokenizer_of
from pipegrad.train.job import Job
from pipegrad.train.preflight import sample_of


def profile_job(job: Job, *, repeats: int = 5) -> tuple[StageCosts, ...]:
    """Returns what one microbatch costs on each stage, measured in this process alone.

    Args:
        job: A job that trains on text; its model fits into this process.
        repeats: Of each pass; the median counts.

    Raises:
        ConfigError: If its stages can only be made, or fed, by their ranks.
        Exception: What a stage raises.
    """
    config, advice = job.config, "call pipegrad.measure_costs in a loop of your own"
    if config.model.is_transformers:
        config.refuse("model", f"its stages are loaded by their ranks, not here: {advice}")
    if job.dataset is not None:
        config.refuse("data.dataset", f"its batches are made by the ranks, not here: {advice}")
    rows = config.data.batch_size // (job.num_shares * config.parallel.microbatches)
    tokens = sample_of(config, tokenizer_of(config)).target.repeat(rows, 1)
    num_stages = len(job.schedule.stage_to_rank)
    stages = job.cut(job.model("cpu")).stages(range(num_stages), recompute=config.train.recompute)
    (name,) = stages[0].inputs
    return profile_stages(
        stages,
        {name: tokens},
        target=tokens,
        loss_fn=job.loss,
        splits=job.schedule.splits_backward,
        is_weighted=config.train.loss_reduction == TOKEN_MEAN,
        repeats=repeats,
    )

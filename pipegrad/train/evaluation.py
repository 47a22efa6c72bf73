"""Evaluation: measures held-out loss, samples and memory between the steps of a run."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from pipegrad import GradientSync, Scheduler
from pipegrad.train.corpus import Tokenizer, mixed
from pipegrad.train.dataset import Feed
from pipegrad.train.job import Job

_LOSS = "loss"


class Evaluation:
    """Measures held-out data and continues a text. All ranks make it, and call it, together.

    Args:
        job: The job.
        scheduler: The pipeline.
        feed: Held-out batches; None if nothing is measured.
        tokenizer: Makes and reads tokens; None if no text is continued.
        length: The most tokens of a text that the model gets.
        ends: Tokens after which a sample ends.
        device: The device of this rank's stages.
    """

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        *,
        feed: Feed | None,
        tokenizer: Tokenizer | None,
        length: int,
        ends: Collection[int] = (),
        device: torch.device,
    ) -> None:
        self._job, self._eval, self._train = job, job.config.eval, job.config.train
        self._scheduler, self._length, self._device = scheduler, length, device
        self._feed, self._tokenizer, self._ends = feed, tokenizer, ends

    def after(self, step: int) -> dict[str, Any]:
        """Returns the measurements due after a step: attributes of `StepMetrics` by name."""
        evaluated: dict[str, Any] = {}
        if self._feed is not None and self._is_due(step, self._eval.every):
            means = self._measure(self._feed)
            evaluated["held_out_loss"] = loss = means.pop(_LOSS)
            evaluated["held_out_metrics"] = means
            if self._train.loss is None and loss < math.log(torch.finfo().max):
                evaluated["perplexity"] = math.exp(loss)
        if self._tokenizer is not None and self._is_due(step, self._eval.sample_every):
            evaluated["sample"] = self._sample(step, self._tokenizer)
        return evaluated

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and (step % every == 0 or step == self._train.steps)

    def _measure(self, feed: Feed) -> dict[str, float]:
        """Returns the mean loss and metrics of the held-out batches, the same on all ranks."""
        rows = list[dict[str, float]]()
        while len(rows) != self._eval.batches:
            with self._scheduler.sync.bounded("an evaluation"):
                feed.fetch(len(rows) + 1)
                (states,) = every_rank(self._scheduler.sync, feed.reply[:1], self._device)
                if not feed.check(states):
                    break
                assert feed.pair is not None
                inputs, target = self._job.placed(feed.pair, self._scheduler.topology, self._device)
                result = self._scheduler.evaluate(inputs, target=target, outputs=False)
                rows.append({**result.metrics, _LOSS: result.loss.item()})
        if not rows:
            self._job.config.refuse("eval.dataset", "the function has no batch any more")
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def _sample(self, step: int, tokenizer: Tokenizer) -> str:
        """Returns the prompt with the tokens that the model adds, the same on all ranks."""
        tokens = [int(token) for token in tokenizer.encode([self._eval.prompt])[0]]
        generator = torch.Generator().manual_seed(mixed(self._train.seed, step))
        for _ in range(self._eval.sample_tokens):
            with self._scheduler.sync.bounded("a sample"):
                tokens.append(self._next(tokens[-self._length :], tokenizer, generator))
            if tokens[-1] in self._ends:
                break
        return tokenizer.decode(tokens)

    def _next(self, context: list[int], tokenizer: Tokenizer, generator: torch.Generator) -> int:
        """Returns the token after `context`, the same on all ranks."""
        # Each microbatch needs a row.
        rows = torch.tensor(context).expand(self._scheduler.schedule.num_sequences, -1)
        topology = self._scheduler.topology
        inputs, _ = self._job.placed((rows, rows), topology, self._device)
        outputs = self._scheduler.evaluate(inputs).outputs
        token = -1
        if topology.num_stages - 1 in topology.local_stages:
            logits = outputs[0][0, len(context) - 1, : tokenizer.size].float().cpu()
            temperature = self._eval.temperature
            if temperature:
                chances = (logits / temperature).softmax(0)
                token = int(torch.multinomial(chances, 1, generator=generator))
            else:
                token = int(logits.argmax())
        (tokens,) = every_rank(self._scheduler.sync, [token], self._device)
        # Replicas have the same sample.
        return int(max(tokens))


def every_rank(
    sync: GradientSync, values: Sequence[float], device: torch.device
) -> list[list[float]]:
    """Returns a list for each value, with the numbers of all ranks, on every rank."""
    row = torch.tensor(values, dtype=torch.float64, device=device)  # counts of bytes are exact
    columns: list[list[float]] = sync.gather(row).T.tolist()
    return columns


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has taken so far, of a device or on CPU."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator counts
            return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB

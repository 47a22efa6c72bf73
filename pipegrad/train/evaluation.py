"""Evaluation: what a run measures beside its steps: held-out loss, samples, and a timeline."""

from __future__ import annotations

import math
import resource
import sys
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.comm.activity import Activity
from pipegrad.comm.collectives import all_reduce
from pipegrad.observe.recording import Recording, record
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.simulation.timeline import Timeline
from pipegrad.train.config import Config
from pipegrad.train.corpus import Tokenizer, mixed
from pipegrad.train.feed import Feed
from pipegrad.train.job import Job

_RECORDED = 3, 8  # last steps of a run: a half of all, at least and at most so many


class Evaluation:
    """Measures held-out data and continues a text. All ranks make it, and call it, together.

    Args:
        job: The job.
        scheduler: The pipeline.
        feed: Held-out batches; None if nothing is measured.
        tokenizer: Makes and reads tokens; None if no text is continued.
        length: The most tokens that the model is given of a text.
        device: Of this rank's stages.
    """

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        *,
        feed: Feed | None,
        tokenizer: Tokenizer | None,
        length: int,
        device: torch.device,
    ) -> None:
        self._job, self._config = job, job.config
        self._scheduler, self._length = scheduler, length
        self._feed, self._tokenizer = feed, tokenizer
        self._device = device
        topology = scheduler.topology
        has_last = topology.num_stages - 1 in topology.local_stages
        others = tuple(name for name, _ in topology.axes if name != topology.pipeline)
        # Along other dimensions ranks have the same sample. One of them sends its tokens.
        self._draws = has_last and not topology.coordinate(others)

    def after(self, step: int) -> dict[str, Any]:
        """Returns what is due after a step: attributes of `StepMetrics` by name."""
        evaluated: dict[str, Any] = {}
        if self._feed is not None and self._is_due(step, self._config.eval.every):
            loss = self._measure(self._feed)
            evaluated["held_out_loss"] = loss
            if self._config.train.loss is None and loss < math.log(torch.finfo().max):
                evaluated["perplexity"] = math.exp(loss)
        if self._tokenizer is not None and self._is_due(step, self._config.eval.sample_every):
            evaluated["sample"] = self._sample(step, self._tokenizer)
        return evaluated

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and (step % every == 0 or step == self._config.train.steps)

    def _measure(self, feed: Feed) -> float:
        """Returns the mean loss of the held-out batches, the same on all ranks."""
        losses = list[float]()
        for number in count(1):
            with self._scheduler.sync.bounded("an evaluation"):
                loss = self._loss_of(feed, number)
            if loss is None:
                break
            losses.append(loss)
            if number == self._config.eval.batches:
                break
        if not losses:
            self._config.refuse("eval.dataset", "the function has no batch any more")
        return sum(losses) / len(losses)

    def _loss_of(self, feed: Feed, number: int) -> float | None:
        """Returns the loss of a held-out batch; None if there is no such batch."""
        feed.fetch(number)
        feed.replies = every_rank(feed.reply, self._device)
        feed.compare()
        if feed.has_ended:
            return None
        assert feed.pair is not None
        inputs, target = self._job.placed(feed.pair, self._scheduler.topology, self._device)
        result = self._scheduler.evaluate(inputs, target=target, outputs=False)
        return result.loss.item()

    def _sample(self, step: int, tokenizer: Tokenizer) -> str:
        """Returns the prompt with the tokens that the model adds, the same on all ranks."""
        tokens = [int(token) for token in tokenizer.encode([self._config.eval.prompt])[0]]
        generator = torch.Generator().manual_seed(mixed(self._config.train.seed, step))
        for _ in range(self._config.eval.sample_tokens):
            with self._scheduler.sync.bounded("a sample"):
                tokens.append(self._next(tokens[-self._length :], tokenizer, generator))
            if tokens[-1] in tokenizer.ends:
                break
        return tokenizer.decode(tokens)

    def _next(self, context: list[int], tokenizer: Tokenizer, generator: torch.Generator) -> int:
        """Returns the token behind some others, the same on all ranks."""
        window = torch.tensor(context)
        # Each microbatch needs a row.
        rows = window.expand(self._scheduler.schedule.num_sequences, -1)
        inputs, _ = self._job.placed((rows, rows), self._scheduler.topology, self._device)
        outputs = self._scheduler.evaluate(inputs).outputs
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._draws:
            logits = outputs[0][0, len(window) - 1, : tokenizer.size].float().cpu()
            token.fill_(self._drawn(logits, generator))
        all_reduce(token)  # zero on all other ranks
        return int(token)

    def _drawn(self, logits: Tensor, generator: torch.Generator) -> int:
        temperature = self._config.eval.temperature
        if not temperature:
            return int(logits.argmax())
        return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def every_rank(values: list[float], device: torch.device) -> list[list[float]]:
    """Returns the values of every rank, on every rank."""
    # float64, so that counts of bytes are exact. Each rank fills its own row, and the sum of these
    # matrices has all rows.
    all_values = torch.zeros(dist.get_world_size(), len(values), dtype=torch.float64, device=device)
    all_values[dist.get_rank()] = torch.tensor(values, dtype=torch.float64, device=device)
    with Activity("the metrics of a step", range(dist.get_world_size())):
        all_reduce(all_values)
    return [[float(x) for x in of_rank] for of_rank in all_values.tolist()]


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has taken so far, of a device or on CPU."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator counts
            return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


class Tracing:
    """Records the steps of a run inside of ``with tracing``, if ``train.trace`` says so.

    All ranks make and enter it.
    """

    def __init__(self, config: Config, scheduler: Scheduler) -> None:
        self._is_wanted, self._num_steps = config.train.trace, config.train.steps
        self._scheduler = scheduler
        self._open = ExitStack()
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            least, most = _RECORDED
            steps = max(least, min(most, self._num_steps // 2))
            self._recording = self._open.enter_context(record(self._scheduler, steps=steps))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the recording on this rank, after the last step."""
        self._open.close()

    def timeline(self) -> Timeline | None:
        """Returns what the first pipeline recorded; None on other ranks, or if nothing was.

        All ranks of the first pipeline must call it.

        Raises:
            PipegradError: If clocks or recordings cannot be read; on all its ranks.
        """
        topology = self._scheduler.topology
        if topology.rank not in topology.one_replica:
            return None
        return None if self._recording is None else self._recording.timeline()

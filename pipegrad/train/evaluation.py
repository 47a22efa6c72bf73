"""Evaluation: what a run measures and shows between its steps, through the pipeline."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.train.config import Config
from pipegrad.train.data.corpus import Tokenizer, mixed
from pipegrad.train.data.feed import Feed, named_inputs, placed, takes_inputs
from pipegrad.train.metrics import every_rank


class Evaluation:
    """Measures held-out data and continues a text. All ranks make it, and call it, together.

    Args:
        config: The configuration.
        scheduler: The pipeline.
        feed: Held-out batches; None if nothing is measured.
        tokenizer: Makes and reads tokens; None if no text is continued.
        device: Of this rank's stages.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        *,
        feed: Feed | None,
        tokenizer: Tokenizer | None,
        device: torch.device,
    ) -> None:
        self._config, self._scheduler = config, scheduler
        self._feed, self._tokenizer = feed, tokenizer
        self._device = device
        topology = scheduler.topology
        self._takes_inputs = takes_inputs(config, topology)
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
        inputs, target = feed.placed(self._device)
        result = self._scheduler.evaluate(inputs, target=target, outputs=False)
        return result.loss.item()

    def _sample(self, step: int, tokenizer: Tokenizer) -> str:
        """Returns the prompt with the tokens that the model adds, the same on all ranks."""
        tokens = [int(token) for token in tokenizer.encode([self._config.eval.prompt])[0]]
        length = self._config.data.sequence_length
        generator = torch.Generator().manual_seed(mixed(self._config.train.seed, step))
        for _ in range(self._config.eval.sample_tokens):
            with self._scheduler.sync.bounded("a sample"):
                tokens.append(self._next(tokens[-length:], tokenizer, generator))
        return tokenizer.decode(tokens)

    def _next(self, context: list[int], tokenizer: Tokenizer, generator: torch.Generator) -> int:
        """Returns the token behind some others, the same on all ranks."""
        window = torch.tensor(context)
        # Each microbatch needs a row.
        rows = window.expand(self._scheduler.schedule.num_microbatches, -1)
        inputs = placed(named_inputs(self._config, rows), self._device)
        outputs = self._scheduler.evaluate(inputs if self._takes_inputs else None).outputs
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._draws:
            logits = outputs[0][0, len(window) - 1, : tokenizer.size].float().cpu()
            token.fill_(self._drawn(logits, generator))
        dist.all_reduce(token)  # zero on all other ranks
        return int(token)

    def _drawn(self, logits: Tensor, generator: torch.Generator) -> int:
        temperature = self._config.eval.temperature
        if not temperature:
            return int(logits.argmax())
        return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))

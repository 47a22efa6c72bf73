"""Job: a configuration for a number of ranks. Plans work offline, without a process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.errors import TopologyError
from pipegrad.gradients.named_optimizer import parts_of
from pipegrad.model.describe import make_manifest
from pipegrad.model.manifest import Manifest
from pipegrad.partition.cut import cut
from pipegrad.partition.cut_model import Cut
from pipegrad.partition.cutting.layers import is_sequential
from pipegrad.pipeline.codings import CodecChoice, choice_of
from pipegrad.pipeline.loss_message import TOKEN_MEAN
from pipegrad.plan.check import refuse_bare_replicas
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plans
from pipegrad.plugins.handler import GradientHandler, handlers
from pipegrad.plugins.registry import Registry, ResolvedPlugin, complaints_of
from pipegrad.schedules import Schedule, ScheduleGenerator, generate
from pipegrad.schedules import registry as schedules
from pipegrad.schedules.measured import MeasuredGenerator
from pipegrad.simulation.choose import Choice as ScheduleChoice
from pipegrad.topology import Topology
from pipegrad.train.config import Config, imported, parameters_of, sizes_of, with_options
from pipegrad.train.corpus import seed_all
from pipegrad.train.dataset import INPUT_IDS, Inputs, Pair, dataset_of
from pipegrad.train.optimizer import kinds
from pipegrad.train.reporters.reporter import Reporter, reporters
from pipegrad.train.schema import Choice
from pipegrad.train.stages import uncut_model

_IGNORED = -100  # of targets: torch's cross_entropy leaves them out


class Job:
    """A configuration applied to a number of ranks. Nothing here communicates.

    Args:
        config: The configuration.
        num_ranks: Number of all ranks. None means as many as the configuration needs.
        costs: A file of costs for the schedule ``auto``, if the configuration names none.

    Attributes:
        num_ranks: Number of all ranks.
        pipeline: Number of pipeline ranks.
        data: Size of the dimension ``dp``.
        num_shares: Number of parts of a batch, which is the size of all data dimensions.
        generator: The plug-in of the schedule.
        schedule: The actions of every pipeline rank.
        codecs: The codecs of hops, for activations and for gradients.
        handlers: The handlers that reduce gradients, by name.
        reporters: The reporters by name.
        dataset: Makes the batches of an epoch; None if text is read.
        held_out: Makes the held-out batches; None if there are none, or if they are of text.

    Raises:
        ConfigError: If sizes contradict each other, or a plug-in cannot be used.
    """

    def __init__(
        self, config: Config, num_ranks: int | None = None, costs: Path | None = None
    ) -> None:
        self.config = config
        self._costs = costs
        self.num_ranks, self.pipeline, self.data, self.num_shares = sizes_of(config, num_ranks)
        # Factories, functions and plug-ins may be modules in the folder of the configuration.
        folder = str(config.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self.handlers: dict[str, ResolvedPlugin[GradientHandler]] = self._plugins(
            "gradient_handlers", handlers, config.gradient_handlers
        )
        self.reporters: dict[str, ResolvedPlugin[Reporter]] = self._plugins(
            "train.reporters", reporters, config.train.reporters
        )
        self.generator: ResolvedPlugin[ScheduleGenerator] = self._refusing(
            "parallel.schedule", schedules.resolve, self._schedule_spec()
        )
        sizes = {"num_ranks": self.pipeline, "num_microbatches": config.parallel.microbatches}
        made = partial(generate, self.generator, **sizes)
        self.schedule: Schedule = self._refusing("parallel.schedule", made)
        self.codecs: CodecChoice = self._refusing("parallel.codecs", self._codecs)
        self._loss = None
        if config.train.loss is not None:
            self._loss = with_options(config, "train.loss", config.train.loss, lambda n: n[:2])
        self._input_name = INPUT_IDS if config.model.is_transformers else ""
        self.dataset = dataset_of(config, "data.dataset", self.num_shares)
        self.held_out = dataset_of(config, "eval.dataset", self.num_shares)

    def topology(self, rank: int = 0) -> Topology:
        """Returns the topology of a rank as plain data."""
        return self._topology.at(rank)

    @cached_property
    def _topology(self) -> Topology:
        axes = (("pp", self.pipeline), ("dp", self.data), *self.config.parallel.dimensions.items())
        return Topology.build(
            axes=axes,
            stage_to_rank=self.schedule.stage_to_rank,
            data=tuple(self.config.parallel.data_dimensions),
        )

    def model(self, device: str = "cpu", topology: Topology | None = None) -> nn.Module:
        """Returns the uncut model. Every call and every rank gets the same initial values.

        A model of transformers has no memory, and every rank must call this.

        Args:
            device: ``"meta"`` for a model without memory, if its factory can make one.
            topology: Passed to a factory that has a parameter of this name. None means the plain
                topology of rank 0.

        Raises:
            ConfigError: If the model cannot be made.
        """
        config = self.config
        if config.model.is_transformers:
            uncut: nn.Module = uncut_model(config)
            return uncut
        assert config.model.factory is not None
        factory, options = (
            imported(config, "model.factory", config.model.factory),
            config.model.options,
        )
        passed = {"topology"} & set(parameters_of(factory))
        if complaint := complaints_of(factory, options, given=passed):
            config.refuse("model", f"the factory {complaint}")
        options |= dict.fromkeys(passed, topology or self.topology())
        # A factory may draw from any of these generators.
        seed_all(config.train.seed)
        with config.refusing("model", "the factory fails: "), torch.device(device):
            model = factory(**options)
        if not isinstance(model, nn.Module):
            config.refuse(
                "model.factory", f"it returns {type(model).__name__}, expected an nn.Module"
            )
        if isinstance(model, nn.Sequential) and not len(model):
            config.refuse("model.factory", "it returns an nn.Sequential without any layer")
        return model

    def loss(self, output: Tensor, target: Tensor) -> Any:  # noqa: ANN401 - the function's own
        """Returns the loss of a microbatch. By default the mean cross-entropy, in fp32.

        With ``train.loss_reduction = "token_mean"`` it is the sum, and the number of targets.
        """
        if self._loss is not None:
            return self._loss(output, target)
        logits, target = output.flatten(0, -2).float(), target.flatten()
        if self.config.train.loss_reduction == TOKEN_MEAN:
            total = functional.cross_entropy(logits, target, reduction="sum")
            return total, (target != _IGNORED).sum()
        return functional.cross_entropy(logits, target)

    def cut(self, model: nn.Module, example: Inputs | None = None) -> Cut:
        """Returns the stages of all ranks.

        Args:
            model: The uncut model.
            example: A row or two of inputs. None means tokens of the text's length.
        """
        boundaries = self.config.parallel.boundaries
        key = "parallel.pipeline" if boundaries is None else "parallel.boundaries"
        options: dict[str, Any] = {}
        if self.config.model.is_transformers:
            key = key if boundaries else "model"  # its configuration may be wrong
        elif not is_sequential(model):
            if example is None and self.dataset is not None:
                self.config.refuse("data.dataset", "only ranks in a run know what it gives a model")
            length = self.config.data.sequence_length
            tokens = torch.zeros(2, length, dtype=torch.long) if example is None else example
            if isinstance(tokens, Tensor):
                self._input_name = next(iter(parameters_of(model.forward)), "x")
                tokens = {self._input_name: tokens}
            options["example"] = tokens
        num_stages = len(self.schedule.stage_to_rank)
        with self.config.refusing(key, "", TopologyError):
            return cut(model, num_stages, boundaries=boundaries, **options)

    def placed(self, pair: Pair, topology: Topology, device: torch.device) -> tuple[Inputs, Tensor]:
        """Returns inputs and targets. Tensors that this rank's stages take are on the device.

        A chain of layers takes inputs on its first stage. Stages of other models all take them, by
        name: each makes masks and positions of them. The Scheduler compares the rest.
        """
        inputs, target = pair
        if isinstance(inputs, Tensor) and self._input_name:
            inputs = {self._input_name: inputs}
        if not isinstance(inputs, Tensor):
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        elif 0 in topology.local_stages:
            inputs = inputs.to(device)
        if topology.num_stages - 1 in topology.local_stages:
            target = target.to(device)
        return inputs, target

    def manifest(self, cut: Cut) -> Manifest:
        """Returns the manifest that the ranks will agree on.

        Raises:
            ConfigError: If a function prepares the stages on their ranks.
        """
        if self.config.parallel.prepare is not None:
            self.config.refuse("parallel.prepare", "what it makes is not known without ranks")
        return make_manifest(cut.modules, self.topology(), tied=cut.tied)

    def plans(self, manifest: Manifest, ranks: Sequence[int] | None = None) -> dict[int, Plan]:
        """Returns the plans of some ranks, or of all ranks.

        Raises:
            PlanError: If `make_plan` raises it. Also if replicas of a trained parameter would drift
                apart because no handler reduces them.
        """
        plans = make_plans(
            manifest,
            self.topology(),
            [(name, resolved.plugin) for name, resolved in self.handlers.items()],
            GradientOptions(
                stage_ticks=self.schedule.stage_ticks,
                shared_ticks=self.schedule.shared_ticks,
                **self.gradient_options,
            ),
            ranks=ranks,
        )
        for plan in plans.values():
            refuse_bare_replicas(
                manifest,
                self.topology(plan.rank),
                dict(plan.routes),
                dict(plan.divisors),
                self.config.gradients.allow_unsynced,
                independent_axes=plan.independent_axes,
            )
        steps = self.config.train.steps
        for name in {plan.independent_by for plan in plans.values()} - {""}:
            if rest := steps % (every := self.handlers[name].plugin.equal_every):
                self.config.refuse(
                    "train.steps",
                    f"{steps} is no multiple of {every}, the steps after which handler {name!r} "
                    f"joins the replicas: they would end as different models; choose "
                    f"{steps - rest + every}",
                )
        self._check_optimizer(manifest, plans.values())
        return plans

    @property
    def gradient_options(self) -> dict[str, Any]:
        """The fields of `GradientOptions` that the configuration has, by name."""
        options = self.config.gradients.model_dump(exclude={"clip_norm", "non_finite"})
        return {
            name: getattr(torch, value) if value and name.endswith("_dtype") else value
            for name, value in options.items()
        } | {"step_timeout_seconds": self.config.train.step_timeout_seconds}

    def _check_optimizer(self, manifest: Manifest, plans: Iterable[Plan]) -> None:
        """Refuses an optimizer that cannot step these parameters, or shards of them."""
        kind, others = kinds(self.config)
        options = self.config.optimizer.options
        trained = [record for record in manifest.parameters if record.requires_grad]
        for plan in plans:
            # With others, the error is that the model has no matrix.
            key = "optimizer.others" if trained and others is not None else "optimizer.name"
            made = partial(parts_of, kind, options, others, records=trained, matrices=plan.matrices)
            for part in self._refusing(key, made):
                key = "optimizer.others.name" if part.steps == "others" else "optimizer.name"
                self._refusing(key, part.check, plan.sharded)

    def _plugins(
        self, key: str, registry: Registry[Any], choices: Sequence[Choice]
    ) -> dict[str, ResolvedPlugin[Any]]:
        specs = [choice.spec for choice in choices]
        # Resolve each plug-in alone first, because its error must name its entry of the list.
        for index, spec in enumerate(specs):
            self._refusing(f"{key}[{index}]", registry.resolve, spec)
        return registry.resolve_all(specs)

    def _schedule_spec(self) -> dict[str, Any]:
        """Returns the schedule's table; a file of costs is seen from the configuration's folder."""
        spec = self.config.parallel.schedule.spec
        if spec["name"] == "auto" and self._costs is not None:
            return {"costs": str(self._costs)} | spec
        if spec["name"] == "auto" and isinstance(spec.get("costs"), str):
            spec["costs"] = str(self.config.path.resolve().parent / spec["costs"])
        return spec

    @property
    def measured_generator(self) -> MeasuredGenerator | None:
        """The generator of schedules if it still takes measured times; else None."""
        plugin = self.generator.plugin
        return plugin if isinstance(plugin, MeasuredGenerator) and plugin.wants_times else None

    @property
    def choice(self) -> ScheduleChoice | None:
        """The chosen schedule and other candidates; None if the configuration names one."""
        plugin = self.generator.plugin
        if not isinstance(plugin, MeasuredGenerator):
            return None
        number = self.config.parallel.microbatches
        choice = plugin.choice(num_ranks=self.pipeline, num_microbatches=number)
        return choice if isinstance(choice, ScheduleChoice) else None

    def _codecs(self) -> CodecChoice:
        choice = choice_of(self.config.parallel.codecs)
        # The model decides which hops are crossed. A hop to a rank that does not exist never is.
        choice.check(list(combinations(range(self.pipeline), 2)))
        return choice

    def _refusing(self, key: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """Returns the function's result; its errors become errors about the key."""
        with self.config.refusing(key):
            return function(*arguments)

"""Gradients that must travel between pipeline stages, and the schedule they travel in.

Once: discover (`find_tied`) -> agree -> plan. Each step: compute -> launch -> finish. The page to
read first is ``pipegrad/gradients/sync.py``.
"""

import importlib
import os
import typing

from pipegrad import _torch_version as _torch_version  # refuses an old torch first

if typing.TYPE_CHECKING:
    from pipegrad import audit as audit
    from pipegrad import checkpoint as checkpoint
    from pipegrad import errors as errors
    from pipegrad import losses as losses
    from pipegrad import schedules as schedules
    from pipegrad.audit.audit import Audit as Audit
    from pipegrad.checkpoint.exporting import load as load
    from pipegrad.comm.sync_points import LateWork as LateWork
    from pipegrad.comm.sync_points import Work as Work
    from pipegrad.gradients.bucketer import Bucketer as Bucketer
    from pipegrad.gradients.grad_scaler import GradScaler as GradScaler
    from pipegrad.gradients.sync import GradientSync as GradientSync
    from pipegrad.interop.torch_pipelining import attach as attach
    from pipegrad.model.describe import make_manifest as make_manifest
    from pipegrad.model.main_grad import MainGrad as MainGrad
    from pipegrad.model.ties import find_tied as find_tied
    from pipegrad.observe.measured_costs import measure_costs as measure_costs
    from pipegrad.observe.recording import record as record
    from pipegrad.orders.verification import verify as verify
    from pipegrad.partition.cut import cut as cut
    from pipegrad.partition.cut_model import Cut as Cut
    from pipegrad.partition.hf_trainer import PipelineTrainer as PipelineTrainer
    from pipegrad.pipeline.scheduler import Scheduler as Scheduler
    from pipegrad.pipeline.stage import Stage as Stage
    from pipegrad.plan.options import GradientOptions as GradientOptions
    from pipegrad.plan.plan import make_plan as make_plan
    from pipegrad.plugins.codec import EdgeCodec as EdgeCodec
    from pipegrad.plugins.codec import codecs as codecs
    from pipegrad.plugins.handler import FlatBucket as FlatBucket
    from pipegrad.plugins.handler import GradientHandler as GradientHandler
    from pipegrad.plugins.handler import OuterOptimizer as OuterOptimizer
    from pipegrad.plugins.handler import ParameterRecord as ParameterRecord
    from pipegrad.plugins.handler import Placement as Placement
    from pipegrad.plugins.handler import Reduction as Reduction
    from pipegrad.plugins.handler import ReductionStep as ReductionStep
    from pipegrad.plugins.handler import handlers as handlers
    from pipegrad.simulation.costs import Costs as Costs
    from pipegrad.simulation.simulator import simulate as simulate
    from pipegrad.topology import Topology as Topology

# Each name is imported at its first use, because the command line, and code that needs one name,
# must not wait for torch.distributed.pipelining, DTensor and torch.compile.
_HOMES = {
    "audit.audit": "Audit",
    "checkpoint.exporting": "load",
    "comm.sync_points": "LateWork Work",
    "gradients.grad_scaler": "GradScaler",
    "gradients.sync": "GradientSync",
    "interop.torch_pipelining": "attach",
    "model.main_grad": "MainGrad",
    "model.describe": "make_manifest",
    "model.ties": "find_tied",
    "observe.measured_costs": "measure_costs",
    "observe.recording": "record",
    "orders.verification": "verify",
    "partition.cut": "cut",
    "partition.cut_model": "Cut",
    "partition.hf_trainer": "PipelineTrainer",
    "pipeline.scheduler": "Scheduler",
    "pipeline.stage": "Stage",
    "plan.options": "GradientOptions",
    "plan.plan": "make_plan",
    "plugins.codec": "EdgeCodec codecs",
    "plugins.handler": (
        "FlatBucket GradientHandler OuterOptimizer ParameterRecord Placement Reduction "
        "ReductionStep handlers"
    ),
    "gradients.bucketer": "Bucketer",
    "simulation.costs": "Costs",
    "simulation.simulator": "simulate",
    "topology": "Topology",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

_FOLDERS = ("audit", "checkpoint", "errors", "losses", "schedules")

__all__ = sorted([*_HOME_OF, *_FOLDERS])  # noqa: PLE0605 - derived, and a test compares


def __getattr__(name: str) -> object:
    """Imports a public name."""
    if name in _FOLDERS:
        return importlib.import_module(f"pipegrad.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pipegrad' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"pipegrad.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


if os.environ.get("PIPEGRAD_CHECK_ORDER") == "1":
    importlib.import_module("pipegrad.testing.ordering.checker").watch_process()

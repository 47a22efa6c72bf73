"""Gradients that must travel between pipeline stages, and the schedule they travel in.

Once: discover (`find_tied`) -> agree -> plan. Each step: compute -> launch -> finish. The page to
read first is ``pipegrad/gradients/sync.py``.
"""

import importlib
import os
import typing

from pipegrad import _torch_version as _torch_version  # refuses an old torch first

if typing.TYPE_CHECKING:
    from pipegrad import schedules as schedules
    from pipegrad.comm.agreement import agree as agree
    from pipegrad.comm.work import Work as Work
    from pipegrad.errors import AgreementError as AgreementError
    from pipegrad.errors import ConfigError as ConfigError
    from pipegrad.errors import DriftError as DriftError
    from pipegrad.errors import PipegradError as PipegradError
    from pipegrad.errors import PlanError as PlanError
    from pipegrad.errors import PluginConflictError as PluginConflictError
    from pipegrad.errors import PluginContractError as PluginContractError
    from pipegrad.errors import PluginError as PluginError
    from pipegrad.errors import PluginLoadError as PluginLoadError
    from pipegrad.errors import PluginNotFoundError as PluginNotFoundError
    from pipegrad.errors import PluginOptionError as PluginOptionError
    from pipegrad.errors import ReduceError as ReduceError
    from pipegrad.errors import ScheduleError as ScheduleError
    from pipegrad.errors import StepError as StepError
    from pipegrad.errors import TopologyError as TopologyError
    from pipegrad.gradients.grad_scaler import GradScaler as GradScaler
    from pipegrad.gradients.state import Statistics as Statistics
    from pipegrad.gradients.sync import GradientSync as GradientSync
    from pipegrad.interop.torch_pipelining import attach as attach
    from pipegrad.model.gradient_storage import Float32Grad as Float32Grad
    from pipegrad.model.gradient_storage import GradAttribute as GradAttribute
    from pipegrad.model.gradient_storage import GradientAccessor as GradientAccessor
    from pipegrad.model.gradient_storage import MainGrad as MainGrad
    from pipegrad.model.manifest import Manifest as Manifest
    from pipegrad.model.merge import make_manifest as make_manifest
    from pipegrad.model.ties import find_tied as find_tied
    from pipegrad.pipeline.loss import StepResult as StepResult
    from pipegrad.pipeline.measure import measure_hops as measure_hops
    from pipegrad.pipeline.partition import Cut as Cut
    from pipegrad.pipeline.partition import split as split
    from pipegrad.pipeline.scheduler import Scheduler as Scheduler
    from pipegrad.pipeline.stage import Stage as Stage
    from pipegrad.plan.plan import Plan as Plan
    from pipegrad.plan.plan import make_plan as make_plan
    from pipegrad.plan.plan import make_plans as make_plans
    from pipegrad.plugins.handler import Exchange as Exchange
    from pipegrad.plugins.handler import FlatBucket as FlatBucket
    from pipegrad.plugins.handler import GradientHandler as GradientHandler
    from pipegrad.plugins.handler import HandlerSpec as HandlerSpec
    from pipegrad.plugins.handler import ParameterRecord as ParameterRecord
    from pipegrad.plugins.handler import Placement as Placement
    from pipegrad.plugins.handler import Reduction as Reduction
    from pipegrad.plugins.handler import ReductionStep as ReductionStep
    from pipegrad.plugins.handler import handlers as handlers
    from pipegrad.reduce.bucketer import Bucketer as Bucketer
    from pipegrad.reduce.ddp_hooks import CommunicationHook as CommunicationHook
    from pipegrad.schedules.program.lower import lower as lower
    from pipegrad.schedules.program.program import Link as Link
    from pipegrad.schedules.program.program import Program as Program
    from pipegrad.schedules.program.verify import Proof as Proof
    from pipegrad.schedules.program.verify import verify as verify
    from pipegrad.schedules.schedule import Schedule as Schedule
    from pipegrad.topology import Topology as Topology

# Each name is imported when it is first asked for: the command line, and whoever needs one thing,
# need not wait for torch.distributed.pipelining, DTensor and torch.compile.
_HOMES = {
    "comm.agreement": "agree",
    "comm.work": "Work",
    "errors": (
        "AgreementError ConfigError DriftError PipegradError PlanError PluginConflictError "
        "PluginContractError PluginError PluginLoadError PluginNotFoundError "
        "PluginOptionError ReduceError ScheduleError StepError TopologyError"
    ),
    "gradients.grad_scaler": "GradScaler",
    "gradients.state": "Statistics",
    "gradients.sync": "GradientSync",
    "interop.torch_pipelining": "attach",
    "model.gradient_storage": "Float32Grad GradAttribute GradientAccessor MainGrad",
    "model.manifest": "Manifest",
    "model.merge": "make_manifest",
    "model.ties": "find_tied",
    "pipeline.loss": "StepResult",
    "pipeline.measure": "measure_hops",
    "pipeline.partition": "Cut split",
    "pipeline.scheduler": "Scheduler",
    "pipeline.stage": "Stage",
    "plan.plan": "Plan make_plan make_plans",
    "plugins.handler": (
        "Exchange FlatBucket GradientHandler HandlerSpec ParameterRecord Placement "
        "Reduction ReductionStep handlers"
    ),
    "reduce.bucketer": "Bucketer",
    "reduce.ddp_hooks": "CommunicationHook",
    "schedules.program.lower": "lower",
    "schedules.program.program": "Link Program",
    "schedules.program.verify": "Proof verify",
    "schedules.schedule": "Schedule",
    "topology": "Topology",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME_OF, "schedules"])  # noqa: PLE0605 - derived, and a test compares


def __getattr__(name: str) -> object:
    """Imports a public name."""
    if name == "schedules":
        return importlib.import_module("pipegrad.schedules")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pipegrad' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"pipegrad.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


if os.environ.get("PIPEGRAD_CHECK_ORDER") == "1":
    from pipegrad.testing.ordering.checker import watch_process

    watch_process()
    del watch_process

"""Gradients that must travel between pipeline stages, and the schedule they travel in.

Once: discover (`find_shared`) -> agree -> plan. Each step: compute -> launch -> finish. The page to
read first is ``pipegrad/gradients/sync.py``.
"""

import os

from pipegrad import _torch_version, schedules  # noqa: F401 - refuses an old torch first
from pipegrad.agreement import agree
from pipegrad.errors import (
    AgreementError,
    ConfigError,
    DriftError,
    PipegradError,
    PlanError,
    PluginConflictError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    PluginOptionError,
    ReduceError,
    ScheduleError,
    StepError,
    TopologyError,
)
from pipegrad.gradients.accessor import Float32Grad, GradAttribute, GradientAccessor, MainGrad
from pipegrad.gradients.bucketer import Bucketer
from pipegrad.gradients.hook import CommunicationHook
from pipegrad.gradients.manifest import Manifest, make_manifest
from pipegrad.gradients.plan import Plan, make_plan, make_plans
from pipegrad.gradients.scaler import GradScaler
from pipegrad.gradients.shared import find_shared
from pipegrad.gradients.sync import GradientSync, Statistics
from pipegrad.handler import (
    Exchange,
    FlatBucket,
    GradientHandler,
    HandlerSpec,
    Hop,
    ParameterRecord,
    Placement,
    Reduction,
    Work,
    handlers,
)
from pipegrad.runtime.loss import StepResult
from pipegrad.runtime.measure import measure_hops
from pipegrad.runtime.scheduler import Scheduler
from pipegrad.runtime.split import Cut, split
from pipegrad.runtime.stage import Stage
from pipegrad.runtime.torch_pipelining import attach
from pipegrad.schedules.action import Schedule
from pipegrad.schedules.lower import lower
from pipegrad.schedules.program import Link, Program
from pipegrad.schedules.verify import Proof, verify
from pipegrad.topology import Topology

__all__ = [
    "AgreementError",
    "Bucketer",
    "CommunicationHook",
    "ConfigError",
    "Cut",
    "DriftError",
    "Exchange",
    "FlatBucket",
    "Float32Grad",
    "GradAttribute",
    "GradScaler",
    "GradientAccessor",
    "GradientHandler",
    "GradientSync",
    "HandlerSpec",
    "Hop",
    "Link",
    "MainGrad",
    "Manifest",
    "ParameterRecord",
    "PipegradError",
    "Placement",
    "Plan",
    "PlanError",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginOptionError",
    "Program",
    "Proof",
    "ReduceError",
    "Reduction",
    "Schedule",
    "ScheduleError",
    "Scheduler",
    "Stage",
    "Statistics",
    "StepError",
    "StepResult",
    "Topology",
    "TopologyError",
    "Work",
    "agree",
    "attach",
    "find_shared",
    "handlers",
    "lower",
    "make_manifest",
    "make_plan",
    "make_plans",
    "measure_hops",
    "schedules",
    "split",
    "verify",
]

if os.environ.get("PIPEGRAD_CHECK_ORDER") == "1":
    from pipegrad.testing.order import watch_process

    watch_process()
    del watch_process

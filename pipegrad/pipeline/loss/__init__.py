"""What is the loss of a step, and how does every rank learn it?

`LossTerms` collects what loss_fn and the stages of a rank gave. `Losses` sends it to all ranks, and
a `StepResult` is what they read.
"""

from pipegrad.pipeline.loss.losses import REDUCTIONS, TOKEN_MEAN, Losses, LossTerms, loss_parts
from pipegrad.pipeline.loss.result import StepResult

__all__ = ["REDUCTIONS", "TOKEN_MEAN", "LossTerms", "Losses", "StepResult", "loss_parts"]

"""Checkpoints: saves the state of a training on one layout of ranks, and resumes it on another.

`state` has the part of one rank, by names of the uncut model. `saving` writes it, also while the
training goes on. `files` has the format of the bytes, and `folders` the names of checkpoints.
`resuming` continues a run, and `exporting` makes the uncut model of a checkpoint.
"""

from pipegrad.checkpoint.exporting import export, load
from pipegrad.checkpoint.folders import newest
from pipegrad.checkpoint.resuming import resume
from pipegrad.checkpoint.saving import Saver
from pipegrad.checkpoint.state import State

__all__ = ["Saver", "State", "export", "load", "newest", "resume"]

"""How does the state of a training survive, and on which layout does it go on?

`state` names what a rank has of the uncut model. `saving` writes it, also while the training goes
on. `files` knows the bytes of a checkpoint and `folders` its names. `resuming` continues a run, and
`exporting` makes the uncut model of a checkpoint.
"""

from pipegrad.checkpoint.exporting import export, load
from pipegrad.checkpoint.folders import newest
from pipegrad.checkpoint.resuming import resume
from pipegrad.checkpoint.saving import Saver
from pipegrad.checkpoint.state import State

__all__ = ["Saver", "State", "export", "load", "newest", "resume"]

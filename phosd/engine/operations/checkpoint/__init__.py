"""Checkpoint: save a process tree, GPU and CPU, and let it go on. protocols.md in code.

``job`` is what all modes have in common; each mode has a file of its own.
"""

from phosd.engine.operations.checkpoint.checkpoint import checkpoint
from phosd.engine.operations.checkpoint.options import MODES, CheckpointChoices, CheckpointOptions

__all__ = ["MODES", "CheckpointChoices", "CheckpointOptions", "checkpoint"]

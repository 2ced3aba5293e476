"""Checkpoint a process tree, its GPU and CPU state (docs/design/protocols.md, Checkpoint).

``checkpoint`` has the steps that all modes share; each mode has a module of its own.
"""

from phosd.engine.operations.checkpoint.checkpoint import checkpoint
from phosd.engine.operations.checkpoint.dry_run import try_checkpoint
from phosd.engine.operations.checkpoint.options import MODES, CheckpointChoices, CheckpointOptions

__all__ = ["MODES", "CheckpointChoices", "CheckpointOptions", "checkpoint", "try_checkpoint"]

"""Implement every operation on a GPU process, usable without the daemon (as root):

    from phosd.engine import CheckpointOptions, Node, NodeConfig, Progress, checkpoint

    node = Node(NodeConfig())
    image = checkpoint(node, 4711, CheckpointOptions(), Progress())

Names that are exported here change as docs/reference/python.md says; the modules of this package
may change with each version.
"""

from typing import TYPE_CHECKING

from phosd.exports import lazily

# Each process of phosd imports a part of the engine, and starts in that much less time.
if TYPE_CHECKING:
    from phosd.engine.image.manifest import Manifest
    from phosd.engine.image.verify import verify
    from phosd.engine.job.progress import Progress
    from phosd.engine.node.gpus import GpuInfo, list_gpus
    from phosd.engine.node.node import Node, NodeConfig
    from phosd.engine.node.suspended import Suspended
    from phosd.engine.operations.checkpoint import (
        CheckpointChoices,
        CheckpointOptions,
        checkpoint,
        try_checkpoint,
    )
    from phosd.engine.operations.migrate import MigrateChoices, MigrateOptions, migrate
    from phosd.engine.operations.restore.options import RestoreOptions
    from phosd.engine.operations.restore.restore import RestoreResult, restore, try_restore
    from phosd.engine.operations.resume import ResumeChoices, ResumeOptions, resume
    from phosd.engine.operations.suspend import SuspendChoices, SuspendOptions, suspend
    from phosd.engine.operations.swap import SwapOptions, swap
    from phosd.engine.program.process import GpuProcess
    from phosd.engine.recovery.account import Account
    from phosd.engine.recovery.rescue import bring_back
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "image.manifest": ("Manifest",),
            "image.verify": ("verify",),
            "job.progress": ("Progress",),
            "node.gpus": ("GpuInfo", "list_gpus"),
            "node.node": ("Node", "NodeConfig"),
            "node.suspended": ("Suspended",),
            "operations.checkpoint": (
                "CheckpointChoices",
                "CheckpointOptions",
                "checkpoint",
                "try_checkpoint",
            ),
            "operations.migrate": ("MigrateChoices", "MigrateOptions", "migrate"),
            "operations.restore.options": ("RestoreOptions",),
            "operations.restore.restore": ("RestoreResult", "restore", "try_restore"),
            "operations.resume": ("ResumeChoices", "ResumeOptions", "resume"),
            "operations.suspend": ("SuspendChoices", "SuspendOptions", "suspend"),
            "operations.swap": ("SwapOptions", "swap"),
            "program.process": ("GpuProcess",),
            "recovery.account": ("Account",),
            "recovery.rescue": ("bring_back",),
        },
    )

__all__ = [
    "Account",
    "CheckpointChoices",
    "CheckpointOptions",
    "GpuInfo",
    "GpuProcess",
    "Manifest",
    "MigrateChoices",
    "MigrateOptions",
    "Node",
    "NodeConfig",
    "Progress",
    "RestoreOptions",
    "RestoreResult",
    "ResumeChoices",
    "ResumeOptions",
    "SuspendChoices",
    "SuspendOptions",
    "Suspended",
    "SwapOptions",
    "bring_back",
    "checkpoint",
    "list_gpus",
    "migrate",
    "restore",
    "resume",
    "suspend",
    "swap",
    "try_checkpoint",
    "try_restore",
    "verify",
]

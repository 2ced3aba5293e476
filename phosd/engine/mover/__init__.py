"""The data mover: a process of its own for each GPU that holds parked memory and moves chunks.

It has its CUDA context, its digest kernel and its pinned ring ready, so that nothing slow happens
while a program stands still. :class:`Mover` is the engine's side of it.
"""

from phosd.engine.mover.client import Mover
from phosd.engine.mover.parked import Process
from phosd.engine.mover.requests import Copies, DrainBoard, Drained, Saved, redundant

__all__ = ["Copies", "DrainBoard", "Drained", "Mover", "Process", "Saved", "redundant"]

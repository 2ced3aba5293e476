"""The data mover: a process of its own for each GPU that holds parked memory and moves chunks.

It has its CUDA context, its digest kernel and its pinned ring ready, so that nothing slow happens
while a program stands still. :class:`~phosd.engine.mover.client.mover.Mover` is the engine's side
of it; ``worker`` is the process, and ``protocol`` what they say to each other.
"""

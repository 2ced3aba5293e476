"""Run the data mover: a process for each GPU that holds parked memory and moves chunks.

Its CUDA context, digest kernel and pinned ring exist before a job needs them, so that nothing slow
happens while a program is stopped. :class:`~phosd.engine.mover.client.mover.Mover` is the engine's
client; ``worker`` is the process, and ``protocol`` their messages.
"""

"""Describe a pool, as phosd lists it."""

from typing import NamedTuple


class Pool(NamedTuple):
    """A pool of programs of ``image``, which belongs to user id ``owner``: ``hollow`` are to wait,
    and there may be ``max`` in all. ``waiting`` wait, and ``running`` were started and live.
    ``trouble``: why none could be made; empty: they could.
    """

    name: str
    owner: int
    image: str
    hollow: int
    max: int
    waiting: int
    running: int
    trouble: str

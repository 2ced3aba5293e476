"""Watch which blocks the processes of a group free, through chunk maps that their hooks write."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.hook_client.free_watch import FreeWatcher
from phosd.engine.hook_client.link import HookLink

Freed = Callable[[int, Path, Sequence[int] | None], bool]
"""Callback for freed blocks: pid, runtime directory, ids as in :class:`FreeWatcher`."""


class FreeWatchers:
    """Watchers of the processes ``pids``, each on one chunk map at a time.

    ``freed`` and ``ended`` are called on the watcher's thread.
    """

    def __init__(self, pids: Collection[int], freed: Freed, ended: Callable[[int], None]) -> None:
        self._pids = frozenset(pids)
        self._freed = freed
        self._ended = ended
        self._watchers: dict[int, FreeWatcher] = {}

    @property
    def complete(self) -> bool:
        """Whether every process is watched, so that its memory may be kept between jobs."""
        return bool(self._pids) and all(
            pid in self._watchers and self._watchers[pid].alive for pid in self._pids
        )

    def watch(self, link: HookLink, chunk_map: ChunkMap) -> None:
        """Watch the process through ``chunk_map``, which becomes ours, and end an earlier watch."""
        self.unwatch([link.pid])
        self._watchers[link.pid] = FreeWatcher(
            link.pid,
            chunk_map,
            partial(self._freed, link.pid, link.runtime_dir),
            partial(self._ended, link.pid),
        )

    def watch_all(self, links: Iterable[HookLink]) -> list[ChunkMap]:
        """Watch each process through a new chunk map, which is ours. Nothing may be parked."""
        chunk_maps = []
        for link in links:
            chunk_map = ChunkMap.create([], [])
            chunk_map.watch()
            try:
                link.arm(chunk_map.fd, [])
            except BaseException:
                chunk_map.close()
                raise
            self.watch(link, chunk_map)
            chunk_maps.append(chunk_map)
        return chunk_maps

    def watch_new(self, links: Iterable[HookLink]) -> None:
        """Watch the processes that are not watched yet."""
        self.watch_all([link for link in links if link.pid not in self._watchers])

    def unwatch(self, pids: Iterable[int] | None = None) -> None:
        """Stop watching these processes; all of them by default."""
        for pid in list(self._watchers if pids is None else pids):
            if watcher := self._watchers.pop(pid, None):
                watcher.end()

    def settle(self) -> None:
        """Tell every hook that the memory which its process freed is released."""
        for watcher in self._watchers.values():
            watcher.settle()

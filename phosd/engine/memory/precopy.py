"""Copy device memory into an image in passes before the stop, with the last pass inside it."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self

from phosd.engine.image.manifest import ChunkRef
from phosd.engine.job.progress import Progress
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import distinct
from phosd.engine.memory.precopy_rounds import PASSES, Missing, copy_while_running
from phosd.engine.mover.client.requests import Copies
from phosd.errors import changed_in_the_stop

Digests = dict[int, list[bytes]]


class Precopy:
    """A copy of a group's memory into an image, in passes. ``incremental``: most of it is expected
    to be in a parent image.
    """

    def __init__(self, dump: MemoryDump, *, incremental: bool = False) -> None:
        self._dump = dump
        self._incremental = incremental
        self._memory = dump.memory
        self._copies: dict[int, Copies] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="precopy")
        self._rest: Future[dict[int, tuple[ChunkRef, ...]]] | None = None
        self._within = Progress()

    def while_running(self, progress: Progress, *, interruptible: bool) -> None:
        """Copy in passes until little is left, or a pass no longer reduces it much.

        If GPUs do not interrupt the program, everything is copied once, or nothing if the image
        is incremental: what differs from the parent is not known before the stop.
        """
        if interruptible:
            copy_while_running(
                self._memory,
                self._dump.links,
                progress,
                lambda: self._missing(self._digests()),
                self._copy,
            )
        elif not self._incremental:
            copy_while_running(
                self._memory,
                self._dump.links,
                progress,
                self._everything,
                partial(self._copy, by_copy_engines=True),
                passes=1,
            )
        else:
            progress.check()
            self._memory.take(self._dump.links)

    def begin_rest(self) -> None:
        """Start copying the rest on another thread. All memory is parked."""
        self._rest = self._pool.submit(self._finish)

    def finish_rest(self) -> dict[int, tuple[ChunkRef, ...]]:
        """Wait for the rest. Returns the chunks of each block, by key."""
        assert self._rest is not None
        return self._rest.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._within.cancel()
        self._pool.shutdown()

    def _finish(self) -> dict[int, tuple[ChunkRef, ...]]:
        digests = self._digests()
        for _ in range(PASSES):
            missing = self._missing(digests)
            if not missing:
                return self._refs(digests)
            # A copy may replace an earlier one that an equal chunk relied on, so look again.
            self._copy(missing, self._within)
        raise changed_in_the_stop(sum(map(len, missing.values())))

    def _digests(self) -> Digests:
        return self._memory.adopted.digest(self._memory.all())

    def _missing(self, digests: Digests) -> dict[int, list[tuple[int, int]]]:
        """Return the chunks whose present bytes are not saved yet, as (key, index) by GPU."""
        saved = {*self._copied()}
        missing: dict[int, list[tuple[int, int]]] = {}
        for exported in self._memory.all():
            for index, digest in enumerate(digests.get(exported.key, ())):
                name = digest.hex()
                if name not in saved and self._dump.writer.find(name) is None:
                    saved.add(name)
                    missing.setdefault(exported.gpu, []).append((exported.key, index))
        return missing

    def _everything(self) -> dict[int, list[tuple[int, int]]]:
        """Return all chunks, as (key, index) by GPU."""
        chunks: dict[int, list[tuple[int, int]]] = {}
        for exported in distinct(self._memory.all()):
            rows = ((exported.key, index) for index in range(exported.chunks))
            chunks.setdefault(exported.gpu, []).extend(rows)
        return chunks

    def _copy(
        self, chunks: Missing[tuple[int, int]], progress: Progress, *, by_copy_engines: bool = False
    ) -> None:
        def one(gpu: int) -> None:
            copies = self._copies.get(gpu)
            if copies is None:
                copies = self._copies[gpu] = Copies(self._dump.writer, self._dump.packs(gpu))
            self._memory.adopted.mover(gpu).copy(
                chunks[gpu], copies, progress, by_copy_engines=by_copy_engines
            )

        with ThreadPoolExecutor(len(chunks)) as pool:
            list(pool.map(one, chunks))

    def _refs(self, digests: Digests) -> dict[int, tuple[ChunkRef, ...]]:
        # What other images have is named there, also if it was copied before that was known.
        copied, find = self._copied(), self._dump.writer.find

        def place(digest: str) -> ChunkRef:
            return find(digest) or copied[digest]

        return {key: tuple(place(part.hex()) for part in parts) for key, parts in digests.items()}

    def _copied(self) -> dict[str, ChunkRef]:
        """Return the chunks that were copied, by digest in hex."""
        refs = (ref for copies in self._copies.values() for ref in copies.refs.values())
        return {ref.digest: ref for ref in refs}

"""Find and remove what callers need no more of what is theirs: output folders and old images."""

from pathlib import Path
from typing import Annotated

import msgspec

from phosd.engine.criu.files.names_beside import TAIL
from phosd.engine.image.manifest import Manifest
from phosd.errors import InvalidOption
from phosd.service.api.views import ImageView, created, microseconds
from phosd.service.clock import age_clock
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import Options, method
from phosd.service.history.history import History
from phosd.service.jobs.engine import Images
from phosd.service.jobs.table import JobTable
from phosd.service.tasks.pools import Pools
from phosd.service.tasks.retention import in_use, last_good, old
from phosd.units import age_text

Age = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
_NEW = 60.0
"""Seconds for which an output folder is not touched: its program may not have opened it yet."""

ThingRow = tuple[str, str, int, int, str]


class OutputOptions(Options, frozen=True):
    """``older``: seconds for which an output folder was not written to."""

    older: Annotated[float, msgspec.Meta(ge=_NEW, le=1e10)] = 86_400.0


class LeftOptions(Options, frozen=True):
    """``older``: seconds since a restore has left a file."""

    older: Age = 0.0


class PruneOptions(OutputOptions, frozen=True):
    """``images``: images that are older than so many seconds, too; of each program the newest
    ``keep`` good ones stay. ``files``: files that restores have left so many seconds ago, too.
    """

    images: Age | None = None
    files: Age | None = None
    keep: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1


class Pruning:
    """Handlers of the manager: whatever they find or remove is the caller's own, also for root. Use
    it on the event loop only.
    """

    def __init__(
        self,
        engine: Images,
        history: History,
        jobs: JobTable,
        pools: Pools,
        query_pool: QueryPool,
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._pools = pools
        self._query_pool = query_pool

    @method("PlanPruning")
    async def plan_pruning(
        self, caller: Caller, outputs: str, options: PruneOptions
    ) -> list[ThingRow]:
        """List what nothing needs any more of what is the caller's: image, output or file; id,
        name in the folder of outputs or path; bytes, time, why; nothing is removed.
        """
        used = self._in_use()

        def plan() -> list[ThingRow]:
            images = self._old_images(caller.uid, options, used)
            gone = {row[1] for row in images}
            before = age_clock() - options.older
            found = self._engine.unneeded_outputs(caller.uid, _folder(outputs), before, gone)
            why = "no process and no image needs it"
            folders: list[ThingRow] = [
                ("output", each.name, each.size, microseconds(each.written), why) for each in found
            ]
            return images + folders + self._left_files(caller.uid, options, used)

        return await self._query_pool.run(caller.uid, plan)

    @method("RemoveOutputs")
    async def remove_outputs(
        self, caller: Caller, outputs: str, names: list[str], options: OutputOptions
    ) -> list[str]:
        """Remove output folders by name, but those that something needs; return which are gone."""
        before = age_clock() - options.older
        return await self._query_pool.run(
            caller.uid,
            self._engine.remove_outputs_of,
            caller.uid,
            _folder(outputs),
            before,
            frozenset(names),
        )

    @method("RemoveFiles")
    async def remove_files(
        self, caller: Caller, paths: list[str], options: LeftOptions
    ) -> list[str]:
        """Remove files that restores have left beside those of the caller's images, by path; return
        which are gone.
        """
        before = age_clock() - options.older
        used, wanted = self._in_use(), frozenset(paths)
        return await self._query_pool.run(
            caller.uid, self._engine.remove_left_files, caller.uid, before, used, wanted
        )

    def _in_use(self) -> set[str]:
        return in_use(self._jobs) | self._pools.images().keys()

    def _left_files(self, uid: int, options: PruneOptions, used: set[str]) -> list[ThingRow]:
        if options.files is None:
            return []
        found = self._engine.left_files(uid, age_clock() - options.files, used)
        return [
            ("file", each.path, each.size, microseconds(each.left), _why_left(each.path))
            for each in found
        ]

    def _old_images(self, uid: int, options: PruneOptions, used: set[str]) -> list[ThingRow]:
        if options.images is None:
            return []
        now = age_clock()
        theirs = sorted(
            (image for image in self._engine.images() if image.owner == uid), key=lambda i: i.id
        )
        damaged = {image for image, (_, whole) in self._history.verified().items() if not whole}
        kept = used | last_good(theirs, damaged, self._history.restored)
        gone = {*old(theirs, now - options.images, options.keep, kept, damaged)}
        return [
            ("image", image.id, _stored(image), created(image), _age(now, created(image)))
            for image in theirs
            if image.id in gone
        ]


def _why_left(path: str) -> str:
    if TAIL in path:
        return "a restore has cut it off"
    return "a restore has put an older one in its place"


def _folder(path: str) -> Path:
    if not path.startswith("/"):
        raise InvalidOption(f"{path!r} is no folder", hint="give its whole path, from / on")
    return Path(path)


def _stored(image: Manifest) -> int:
    return ImageView(image).stored_bytes


def _age(now: float, made: int) -> str:
    return f"it is {age_text(now - made / 1e6)} old"

"""Maintain the history and the image store alongside the jobs."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from phosd.errors import PhosError
from phosd.service.api.durability import Durability
from phosd.service.api.inventory import Inventory
from phosd.service.clock import age_clock
from phosd.service.config import Config
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Images
from phosd.service.jobs.table import JobTable
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.pools import Pools
from phosd.service.tasks.retention import Retention, in_use
from phosd.service.tasks.sleepers import Sleepers
from phosd.units import human_bytes

_DAY = 86_400.0
_log = logging.getLogger(__name__)


class Maintenance:
    """Periodic maintenance. Calls ``changed`` when :attr:`troubles` may have changed. ``config``
    holds the retention settings. Use it on the event loop only.
    """

    def __init__(
        self,
        config: Config,
        engine: Images,
        history: History,
        jobs: JobTable,
        inventory: Inventory,
        periodic: Periodic,
        sleepers: Sleepers,
        pools: Pools,
        changed: Callable[[], None],
    ) -> None:
        self.config = config
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._inventory = inventory
        self._periodic = periodic
        self._pools = pools
        self._sleepers = sleepers
        self._changed = changed
        self._retention = Retention(engine, history)
        self.durability = Durability(engine, history, inventory.refresh_images, changed)
        self._deleting = asyncio.Lock()
        self._renewals = 0
        self._damaged: Mapping[str, PhosError] = {}
        self._refused = ""

    @property
    def troubles(self) -> list[str]:
        """Problems of the node that do not stop jobs."""
        own = filter(None, (self._refused, self._history.trouble, self.durability.trouble))
        return [*own, *map(str, self._damaged.values())]

    @property
    def refused(self) -> str:
        """Why the configuration in use is not the one on the disk, which was to be read again;
        empty: it is.
        """
        return self._refused

    @refused.setter
    def refused(self, why: str) -> None:
        self._refused = why
        self._changed()

    async def go_on(self) -> None:
        """Delete old records, images and outputs once a day."""
        while True:
            self.forget_old()
            await self.delete_old()
            await self.compact()
            await self.remove_outputs()
            await asyncio.sleep(_DAY)

    def forget_old(self) -> None:
        """Delete records that exceed the configured retention."""
        self._history.prune(age_clock() - self.config.retention_days * _DAY)

    async def history_changed(self) -> None:
        """React to a change of the history: trouble began or ended, or a new file was started."""
        self._changed()
        if trouble := self._history.trouble:  # recorded once the trouble is over
            self._history.event(Event("history", "history.db", trouble, Severity.ERROR))
        if self._renewals != self._history.renewals:
            self._renewals = self._history.renewals
            text = "history.db was damaged and begun anew"
            self._history.event(Event("history", "history.db", text, Severity.ERROR))
            for each in (self._periodic, self._pools, self._sleepers):
                each.write_again()
            await self.reconcile()

    async def reconcile(self) -> None:
        """Make the history match the images on disk."""
        self._history.reconcile(await asyncio.to_thread(self._engine.images))
        await self.look_for_damage()

    async def look_for_damage(self) -> None:
        """Report images that no list shows because they cannot be read."""
        found = await asyncio.to_thread(self._engine.damaged)
        for image in found.keys() - self._damaged.keys():
            text = str(found[image])
            _log.warning("%s", text)
            self._history.event(Event("image-unreadable", image, text, Severity.ERROR))
        changed = found.keys() != self._damaged.keys()
        self._damaged = found
        if changed:
            self._changed()

    async def delete_old(self) -> None:
        """Delete images that exceed the configured limits."""
        async with self._deleting:
            used = in_use(self._jobs) | self._pools.images().keys()
            rules = self.config.limits
            try:
                if await asyncio.to_thread(self._retention.enforce, rules, used):
                    await self._inventory.refresh_images()
            except (PhosError, OSError) as error:
                _log.warning("old images could not be deleted: %s", error)

    async def remove_outputs(self) -> None:
        """Remove outputs of programs that are older than the history."""
        before = age_clock() - self.config.retention_days * _DAY
        removed = await asyncio.to_thread(
            lambda: self._engine.remove_outputs(self._history.users(), before)
        )
        if removed:
            _log.info("%d output folders of `phos run` were removed", removed)

    async def compact(self) -> None:
        """Rewrite packs to free the bytes of deleted images, while no job runs."""
        async with self._deleting:
            try:
                freed = await asyncio.to_thread(
                    self._engine.compact, lambda: self._jobs.running == 0
                )
            except (PhosError, OSError) as error:
                _log.warning("packs could not be written anew: %s", error)
                return
        if freed:
            _log.info("packs were written anew, which gave back %s", human_bytes(freed))
            self._history.event(Event("compacted", "packs", f"{human_bytes(freed)} given back"))
            await self._inventory.refresh_images()

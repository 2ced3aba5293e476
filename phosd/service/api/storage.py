"""Say how full the disk of the images is, and what users' images take of it."""

import os
from collections.abc import Callable

from phosd.service.api.image_sizes import ImageSizes
from phosd.service.api.inventory import Inventory
from phosd.service.api.views import suspended
from phosd.service.config import Config
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import method
from phosd.service.jobs.limits import limits_of


class Storage:
    """Handler of the manager. ``config`` is asked each time: quotas change while phosd runs."""

    def __init__(
        self,
        inventory: Inventory,
        rights: Rights,
        query_pool: QueryPool,
        config: Callable[[], Config],
    ) -> None:
        self._inventory = inventory
        self._rights = rights
        self._query_pool = query_pool
        self._config = config
        self._sizes = ImageSizes()

    @method("GetStorage")
    async def get_storage(self, caller: Caller) -> tuple[int, int, int, int]:
        """Return the size of the images' disk, its free bytes, and what the caller's images take
        and may take; what has a quota counts suspended programs, too.
        """
        config = self._config()
        sees_all = await self._rights.inspects(caller)
        images = tuple(self._inventory.images.values())
        programs = suspended(self._inventory.views.values())
        quota = None if sees_all else limits_of(config.limits, caller.uid).quota

        def read() -> tuple[int, int, int, int]:
            disk = os.statvfs(config.state_dir)
            total, free = (blocks * disk.f_frsize for blocks in (disk.f_blocks, disk.f_bavail))
            sizes = self._sizes.by_user(images)
            if quota is not None:
                for away, views in programs.items():
                    sizes[views[0].process.uid] += away.stored_bytes
            return total, free, sizes.total() if sees_all else sizes[caller.uid], quota or 0

        return await self._query_pool.run(caller.uid, read)

"""Say how full the disk of the images is, and what users' images take of it."""

import os
from collections import defaultdict
from collections.abc import Callable

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import total_bytes
from phosd.service.api.inventory import Inventory
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

    @method("GetStorage")
    async def get_storage(self, caller: Caller) -> tuple[int, int, int, int]:
        """Return the size of the images' disk, its free bytes, and what the caller's images take
        and may take.
        """
        config = self._config()
        sees_all = await self._rights.inspects(caller)
        owners = defaultdict[int, list[Manifest]](list)
        for view in self._inventory.images.values():
            if sees_all or view.manifest.owner == caller.uid:
                owners[view.manifest.owner].append(view.manifest)
        quota = None if sees_all else limits_of(config.limits, caller.uid).quota

        def read() -> tuple[int, int, int, int]:
            disk = os.statvfs(config.state_dir)
            total, free = (blocks * disk.f_frsize for blocks in (disk.f_blocks, disk.f_bavail))
            return total, free, sum(map(total_bytes, owners.values())), quota or 0

        return await self._query_pool.run(caller.uid, read)

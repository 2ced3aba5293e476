"""Make, change and end pools, and start their programs."""

import asyncio
import re

from phosd.errors import InvalidOption
from phosd.service.api.views import job_path, pool_path
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.spec import method
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import JobOptions, PoolRequest
from phosd.service.jobs.pool import NAMED, POOL_NAME, Pool
from phosd.service.tasks.pools import Pools, pool_of

PoolRow = tuple[str, int, str, int, int, str]


class PoolMethods:
    """Handlers of the manager. Use it on the event loop only."""

    def __init__(self, engine: Engine, pools: Pools, rights: Rights) -> None:
        self._engine = engine
        self._pools = pools
        self._rights = rights

    @method("CreatePool")
    async def create_pool(
        self, caller: Caller, name: str, image: str, options: PoolRequest
    ) -> None:
        """Keep programs of an image ready."""
        if not re.fullmatch(POOL_NAME, name):
            raise InvalidOption(f"a pool cannot be called {name!r}", hint=NAMED)
        manifest = await asyncio.to_thread(self._engine.image, image)
        await self._rights.require(
            caller, Action.RESTORE, manifest.owner, f"image {image}", image=image
        )
        self._pools.create(pool_of(name, manifest, options))

    @method("ScalePool")
    async def scale_pool(self, caller: Caller, name: str, options: PoolRequest) -> None:
        """Change how many programs of a pool there are."""
        _require_not_stated(await self._theirs(caller, name))
        self._pools.scale(name, options)

    @method("RemovePool")
    async def remove_pool(self, caller: Caller, name: str) -> None:
        """End a pool; returns when its programs that waited have ended."""
        _require_not_stated(await self._theirs(caller, name))
        await self._pools.remove(name)

    @method("ListPools")
    async def list_pools(self, caller: Caller) -> list[PoolRow]:
        """List the pools that the caller may see."""
        everybody = await self._rights.inspects(caller)
        seen = [each for each in self._pools if everybody or caller.may_touch(each.pool.owner)]
        await self._pools.look(seen)
        return [
            (
                *(each.pool.name, each.pool.owner, each.pool.image),
                *(len(each.resting), len(each.started), pool_path(each.pool.name)),
            )
            for each in seen
            if not each.removed
        ]

    @method("StartPooled")
    async def start_pooled(self, caller: Caller, name: str, options: JobOptions) -> str:
        """Start a program of a pool."""
        await self._theirs(caller, name)
        return job_path(self._pools.begin(name, caller.uid, options.token))

    async def _theirs(self, caller: Caller, name: str) -> Pool:
        pool = self._pools.named(name)
        await self._rights.require(
            caller, Action.RESTORE, pool.owner, f"pool {name}", image=pool.image
        )
        return pool


def _require_not_stated(pool: Pool) -> None:
    """Raise :class:`InvalidOption` for a pool that only the administrator changes."""
    if pool.stated:
        raise InvalidOption(
            f"the pool {pool.name} is as phosd.toml says",
            hint="its administrator changes the [[pools]] there (`systemctl reload phosd`)",
        )

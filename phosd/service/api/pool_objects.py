"""Publish pools on the bus."""

from phosd.service.api.views import pool_path
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.spec import Served
from phosd.service.tasks.kept_pool import KeptPool


def show_pool(tree: ObjectTree, served: Served, kept: KeptPool) -> None:
    """Publish a pool if it is new, withdraw it if it is removed, and signal what has changed."""
    path = pool_path(kept.pool.name)
    if kept.removed:
        tree.withdraw(path)
    elif path in tree:
        tree.changed(path)
    else:
        tree.publish(path, served, kept, kept.pool.owner)

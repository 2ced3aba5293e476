"""Check who may save a process tree or restore an image, since its content runs as its owner."""

import grp
import os
import pwd

from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.image.manifest import Manifest, Process
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system.procfs import describe
from phosd.errors import NotAuthorized

ROOT = 0


def require_may_save(tree: ProcessTree, caller: int) -> None:
    """Raise :class:`NotAuthorized` unless user ``caller`` owns the whole tree, or is root."""
    if caller == ROOT:
        return
    why = tree.privileged
    if tree.root.uid != caller:
        why = f"{describe(tree.root.pid)} belongs to uid {tree.root.uid}"
    if why:
        raise NotAuthorized(
            f"uid {caller} may not save the tree of process {tree.root.pid}: {why}",
            hint="ask as root",
        )


def require_may_restore(manifest: Manifest, caller: int) -> None:
    """Raise :class:`NotAuthorized` unless user ``caller`` owns the whole image, or is root.

    An image may record groups that the user has been removed from since.
    """
    _require_whole(manifest, caller, "restore")


def require_may_export(manifest: Manifest, caller: int) -> None:
    """Raise :class:`NotAuthorized` unless user ``caller`` may restore the image: who has its bytes
    has the memory of its programs.
    """
    _require_whole(manifest, caller, "export")


def _require_whole(manifest: Manifest, caller: int, what: str) -> None:
    if caller == ROOT:
        return
    reasons = [tree.details.privileged for tree in manifest.trees if tree.details is not None]
    why = "; ".join(filter(None, reasons))
    others = {process.uid for process in manifest.processes} - {caller}
    if others:
        why = f"it holds processes of uid {min(others)}"
    if not why and (left := _groups(manifest) - _groups_of(caller)):
        why = f"it would be in group {_name(min(left))}, which uid {caller} is not in (any more)"
    if why:
        raise NotAuthorized(
            f"uid {caller} may not {what} image {manifest.id}: {why}", hint="ask as root"
        )


def _groups(manifest: Manifest) -> set[int]:
    """Return the groups of all processes of the image."""
    recorded: list[Process | CpuDetails] = [*manifest.processes]
    recorded += [tree.details for tree in manifest.trees if tree.details is not None]
    return {group for each in recorded for group in (each.gid, *each.groups)}


def _groups_of(user: int) -> set[int]:
    """Return the groups that the user is in now."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError as error:
        raise NotAuthorized(
            f"the groups of uid {user} are not known: it has no entry in the user database",
            hint="ask as root",
        ) from error
    return {*os.getgrouplist(entry.pw_name, entry.pw_gid)}


def _name(group: int) -> str:
    try:
        return f"{grp.getgrgid(group).gr_name} ({group})"
    except KeyError:  # the group was removed
        return str(group)

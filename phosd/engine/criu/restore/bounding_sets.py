"""Let CRIU restore a program with the bounding set that CRIU itself has, without a capability.

For each capability that a thread's saved bounding set lacks CRIU calls ``PR_CAPBSET_DROP``, which
takes CAP_SETPCAP, also where CRIU's own set lacks it already and nothing is dropped. CAP_SETPCAP is
for no user's CRIU: whoever has it sets secure bits with which a setuid program, which becomes its
user, keeps the capabilities of root (capabilities(7), ``SECBIT_NO_SETUID_FIXUP``).

So phosd gives CRIU's process the program's bounding set before it becomes the user
(:func:`~phosd.engine.system.privileges.become`), and full sets in a private copy of CRIU's files.
CRIU drops nothing, and its tasks inherit the set. What they have in the end is compared with the
image's own files before anything of the program runs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from phosd.engine.criu.images.fields import CoreEntry, CredsEntry, ThreadCoreEntry
from phosd.engine.criu.images.image_file import Change, Field, changed, rewrite
from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.restore.private_copy import own_copy, require_as_saved
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.system import procfs

_WORD = 0xFFFFFFFF


@contextmanager
def with_full_sets(
    tree: SavedTree, rights: Rights, *, private: bool = False
) -> Iterator[tuple[SavedTree, bool]]:
    """Yield a user's tree with CRIU files that have full bounding sets, and whether its folder
    is a private copy. ``rights`` are those of the image; ``private``: it is one already.

    Root's CRIU has CAP_SETPCAP, and gives each thread its own set. Raises :class:`Internal`, and
    :class:`ImageCorrupt` for a file that is not the recorded one.
    """
    if tree.user.is_root or rights.bounding in (None, everything()):
        yield tree, private
        return
    with nullcontext(tree) if private else own_copy(tree) as copy:
        for path in copy.folder.glob("core-*.img"):
            require_as_saved(copy, path.name)
            rewrite(path, _with_set(everything()))
        yield copy, True


def everything() -> int:
    """Return the set of all capabilities of this kernel."""
    last = int((procfs.PROC / "sys/kernel/cap_last_cap").read_text())
    return (1 << last + 1) - 1


def _with_set(mask: int) -> Change:
    """Return the change of a ``core_entry`` with this bounding set."""

    def credentials(entry: Iterable[Field]) -> Iterator[Field]:
        yield from (field for field in entry if field.number != CredsEntry.CAP_BND)
        for word in (mask & _WORD, mask >> 32):
            yield Field.of(CredsEntry.CAP_BND, word)

    thread = partial(_with_changed, ThreadCoreEntry.CREDS, credentials)
    return partial(_with_changed, CoreEntry.THREAD_CORE, thread)


def _with_changed(
    number: int, change: Callable[[list[Field]], Iterable[Field]], entry: Iterable[Field]
) -> Iterator[Field]:
    """Return the fields of a message, in which the message with this number is changed."""
    return (changed(field, change) if field.number == number else field for field in entry)

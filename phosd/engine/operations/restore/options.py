"""Say how an image is to be restored."""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.restore.clone import CloneFiles, ClonePorts

if TYPE_CHECKING:  # mypy cannot evaluate a Literal of computed values
    Files = str
    Cloned = str
    Ports = str
else:
    Files = Literal[tuple(map(str, Policy))]
    Cloned = Literal[tuple(map(str, CloneFiles))]
    Ports = Literal[tuple(map(str, ClonePorts))]

CloneName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A([A-Za-z0-9][A-Za-z0-9_-]{0,31})?\Z",
        title="a name of up to 32 letters, digits, `_` and `-`, the first no `_` or `-`",
    ),
]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class RestoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a restore.

    ``files``: what to do with files that have changed since: ``rollback`` puts those back that the
    image has, ``cut`` cuts those to their old length that the program only wrote to and that grew,
    ``keep`` does neither; others are refused, unless they are only appended to. What is replaced or
    cut stays in a file beside. With ``as-is`` the program goes on with all that are still there as
    they are. ``output``: an append-only file for the program's output, if its
    standard output was a pipe or a terminal; empty: none. ``end``: a file that tells how the
    program ended, once it has: a line, ``exit CODE`` or ``signal NUMBER``. The program's user
    writes both.
    ``pid_namespace``: the program gets a pid namespace of its own, in which its ids are free, also
    if it was in none. ``clone``: the name of a clone of the program, which is restored in such a
    namespace, beside the program and other clones; empty: the program itself is restored.
    ``clone_files``: a clone writes to a ``copy`` of each file on the disk that the program wrote to
    (``FILE.clone-NAME``, as the file was at the checkpoint), or may ``share`` those that it only
    appends to, or there is none if it would write to any (``refuse``).
    ``clone_ports``: where another program has a TCP port on which the program listened, a clone
    listens on another one (``move``), or there is none (``refuse``); or it ``always`` does.
    ``gpu``: a GPU of this node, or ``OLD:NEW`` for each of several (``placement.py``); in place of
    those that are not named, it gets the same, or others like them. ``cgroups_of``: the pid of a
    process of the image's owner, in whose cgroups the program goes on; 0: in those that it was in.
    ``hollow``: the program is left suspended, with its contexts on the GPUs and its memory in host
    memory or, where that has no room, on the disk.
    ``follower``: the pid of a process of the image's owner, which waits for the program, and ends
    as that does: what starts it again starts the program again; 0: there is none.
    """

    files: Files = "rollback"
    output: str = ""
    end: str = ""
    pid_namespace: bool = False
    clone: CloneName = ""
    clone_files: Cloned = "copy"
    clone_ports: Ports = "move"
    gpu: str = ""
    cgroups_of: Pid = 0
    hollow: bool = False
    follower: Pid = 0

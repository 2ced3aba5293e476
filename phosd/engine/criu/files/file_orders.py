"""What phosd and its file worker say to each other."""

from enum import StrEnum

import msgspec

from phosd.engine.image.cpu_manifest import (
    DeclaredState,
    MappedFile,
    MemoryFile,
    OpenFile,
    WrittenFile,
)


class Policy(StrEnum):
    """The treatment of files that are not as they were at the checkpoint.

    ``KEEP`` refuses them. ``CUT`` cuts those that were only written to and have grown. ``ROLLBACK``
    also puts those back whose bytes are in the image. What was there stays beside. With ``AS_IS``
    the program goes on with them as they are, unless they are gone.
    """

    ROLLBACK = "rollback"
    KEEP = "keep"
    CUT = "cut"
    AS_IS = "as-is"


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of ``path``. ``beside`` holds what was there: a file's tail, or the whole file.
    ``folder`` marks a folder that was made, ``stays`` that what is beside is to stay there, and
    ``in_place`` that the file itself was written, of which a copy is beside.
    """

    path: str
    beside: str
    cut_to: int | None = None
    folder: bool = False
    stays: bool = False
    in_place: bool = False


class Outputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output folders in ``folder`` that were not written to since ``before`` (epoch seconds).

    ``remove`` names those to remove; if empty, they are only listed.
    """

    folder: str
    before: float
    remove: tuple[str, ...] = ()


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An output folder: its name, bytes of its files, and when it was last written to (epoch
    seconds).
    """

    name: str
    size: int
    written: float


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What restores have left until ``before`` (epoch seconds) beside ``files``, beside what
    ``patterns`` stand for, and beside anything in ``folders``.

    ``remove`` has the paths of those to remove; if empty, they are only listed.
    """

    files: tuple[str, ...]
    before: float
    patterns: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a restore has left of ``file`` at ``path``: bytes that it takes on the disk, and when it
    was left (epoch seconds).
    """

    path: str
    file: str
    size: int
    left: float


class Hashed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of which the first ``size`` bytes are to be hashed."""

    path: str
    size: int


class Copied(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of which the first ``size`` bytes are to be in a new file ``target``."""

    path: str
    target: str
    size: int


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was declared, which the worker has open as ``descriptor``."""

    path: str
    descriptor: int


class Orders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The orders. ``sources`` are inherited descriptors of the saved bytes of the memory files, and
    ``written`` those of the written files.

    ``mark`` goes into the names of files kept beside. ``undo`` are changes to undo; ``settle`` are
    changes to keep, so that replaced memory files can be removed (cut tails are kept). ``folders``
    are those in which the owner is to make files, and ``identified`` files of which to return the
    inodes. ``needed`` are folders that are made if they are missing. ``copies`` are of open files,
    which may have grown, and are not cut. ``outputs_made`` are open files that are made anew,
    empty, if they are missing, with the folders that they are in. ``mended`` are files of which
    interrupted work is undone: what was half done, and what was done with this ``mark``.
    ``declared`` are folders, files and patterns of which the files are to be opened, and kept open
    until the next such orders. ``state`` is what was there at the stop: what was made since is put
    aside.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    mark: str
    apply: bool = False
    policy: Policy = Policy.KEEP
    open_files: tuple[OpenFile, ...] = ()
    memory_files: tuple[MemoryFile, ...] = ()
    mapped_files: tuple[MappedFile, ...] = ()
    written_files: tuple[WrittenFile, ...] = ()
    written: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    undo: tuple[Change, ...] = ()
    settle: tuple[Change, ...] = ()
    outputs: Outputs | None = None
    hashed: tuple[Hashed, ...] = ()
    folders: tuple[str, ...] = ()
    identified: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    copies: tuple[Copied, ...] = ()
    outputs_made: tuple[OpenFile, ...] = ()
    mended: tuple[WrittenFile, ...] = ()
    declared: tuple[str, ...] = ()
    state: DeclaredState | None = None
    versions: Versions | None = None

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that whoever carries them out needs."""
        return (*self.sources, *self.written)


class Inode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that is at a path."""

    path: str
    device: int
    number: int


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer. ``problems`` are sentences for the user; if there are any, nothing was changed.
    ``told`` says what is done, or would be, with files that are not as they were; ``back`` are
    those that are put back, ``aside`` those that are put aside. ``found`` are the files that were
    declared, and ``state`` is all that is there.

    ``outputs`` are the folders found or removed, and ``versions`` the files. ``digests`` are empty
    for files that cannot be read; ``closed`` are the folders in which the owner cannot make files,
    and ``inodes`` those of the files that exist.
    """

    problems: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    outputs: tuple[Output, ...] = ()
    digests: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    inodes: tuple[Inode, ...] = ()
    told: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    aside: tuple[Inode, ...] = ()
    found: tuple[Found, ...] = ()
    state: DeclaredState | None = None
    versions: tuple[Version, ...] = ()

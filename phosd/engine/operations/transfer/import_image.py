"""Take an image from the program that brings it (docs/design/protocols.md, Import).

The manifest comes first, and nothing of it is taken on trust. Its signer, the room in the store,
and whether the image could be restored here are known before the first chunk is asked for.
Every chunk is compared with its hash, and gets the store's own digest. The image is invisible until
it is whole; until then its end leaves nothing.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Orders, Policy
from phosd.engine.criu.restore.admission import require_restorable
from phosd.engine.criu.restore.saved_tree import saved_trees
from phosd.engine.criu.restore.tree_files import checkable, made_if_missing
from phosd.engine.faults import Point, point
from phosd.engine.image.cpu_manifest import WRITTEN, CpuDetails, MappedFile, OpenFile
from phosd.engine.image.manifest import ChunkRef, Manifest
from phosd.engine.image.name import next_number
from phosd.engine.image.portable import PortableImage, image_with, parsed
from phosd.engine.image.sha256_hints import Sha256Hints
from phosd.engine.image.signature import ALLOWED_SIGNERS, require_signed
from phosd.engine.image.store import ImageWriter
from phosd.engine.image.tier import ExpectedSize
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checks import Check, Finding, findings, require_all
from phosd.engine.job.progress import Progress
from phosd.engine.node.machine import same_machine
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import UNLIMITED, DiskLimits, require_room
from phosd.engine.operations.permissions import ROOT, require_may_restore
from phosd.engine.operations.restore.image_gpus import require_places
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.engine.operations.transfer.image_receiver import ImageReceiver
from phosd.engine.system import procfs
from phosd.errors import NotAuthorized
from phosd.portable import packed_map, read_head

_File = TypeVar("_File", OpenFile, MappedFile)

_SPARE = 1 << 20
"""Bytes that the names and folders of CRIU's files take."""


class ImportChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What users may choose of an import. ``anyway``: also if it could not be restored here now.
    ``again``: also if the image is here already.
    """

    anyway: bool = False
    again: bool = False


class ImportOptions(ImportChoices, frozen=True, kw_only=True):
    """Options of an import. The image is going to belong to user ``owner``. With ``trust`` it needs
    no signature; otherwise one by a key that ``signers`` lists for this user.
    """

    owner: int
    trust: bool = False
    signers: Path = ALLOWED_SIGNERS
    limits: DiskLimits = UNLIMITED


def import_image(
    node: Node, options: ImportOptions, stream: CallerStream, progress: Progress
) -> Manifest:
    """Store the image that comes over ``stream``, and return its manifest here: that of the image
    that is here already, unless it is to be stored again.
    """
    progress.phase("receive manifest")
    found = _received(options, stream)
    if not options.again and (here := _here_already(node, found.image, options.owner)):
        stream.send(packed_map([False] * len(found.chunks)))
        progress.note(f"the image is here already, as {here.id}; `--again` stores it a second time")
        progress.finish()
        return here
    progress.note(_vouched(options))
    if not options.anyway:
        require_all(_restorable(node, found, progress))
    progress.check()
    size = ExpectedSize(found.file_bytes + _SPARE, found.device_bytes)
    require_room(node, size, options.limits)
    quota = options.limits.quota(options.owner)
    # On the disk: in memory others would wait for the room as long as the bytes take to come.
    with node.store.begin(options.owner, quota, node.suspend_store.taken) as writer:
        # How much of the memory other images have is known only when it has come.
        writer.reserve(found.file_bytes + max(0, found.device_bytes - writer.shareable_bytes))
        writer.reserve(0)  # what comes is reserved as it comes
        receiver = ImageReceiver(node.store, found, writer, stream, progress)
        hints = Sha256Hints(node.store, options.owner)
        progress.phase("compare")
        receiver.take_what_is_here(hints.read())
        wanted = receiver.wanted
        progress.phase("receive", bytes_total=sum(found.chunks[n].length for n in wanted))
        stream.send(packed_map([number in wanted for number in range(len(found.chunks))]))
        places = receiver.receive()
        progress.phase("publish")
        manifest = _of_this_store(node, found, writer, places, options.owner)
        for tree in saved_trees(manifest, writer.folder):
            require_restorable(node.criu, tree)
        progress.check()
        point(Point.IMPORT_PUBLISH)
        writer.publish(manifest)
    hints.add({found.chunks[number].sha256: ref.digest for number, ref in places.items()})
    progress.finish()
    return manifest


def try_import(
    node: Node, options: ImportOptions, stream: CallerStream, cancellation: Cancellation
) -> list[Finding]:
    """Return what stands in the way of the image whose manifest comes over ``stream``: of its
    import and of its restore here. Nothing is stored.

    Raises what the manifest itself, its signature or its owner stand in the way with.
    """
    found = _received(options, stream)
    size = ExpectedSize(found.file_bytes + _SPARE, found.device_bytes)
    room = partial(require_room, node, size, options.limits)
    return findings([("space", room), *_restorable(node, found, cancellation)])


def _received(options: ImportOptions, stream: CallerStream) -> PortableImage:
    """Receive a manifest, and return it if it may be imported.

    A signature is checked before a byte of what it is for is looked at.
    """
    head = read_head(stream.receive)
    if not options.trust:
        require_signed(head, options.owner, options.signers)
    found = parsed(head.manifest)
    require_may_own(found.image, options.owner)
    return found


def _here_already(node: Node, image: Manifest, owner: int) -> Manifest | None:
    """Return the owner's image that is the one to be imported: that was exported from here, or
    imported before.
    """
    sought = _identity(image)
    own = (each for each in node.store.list() if each.owner == owner)
    return next((each for each in own if _identity(each) == sought), None)


def _identity(image: Manifest) -> tuple[object, ...]:
    """Return what an image has in common with its copies alone. Two machines may give one id."""
    return image.origin or image.id, image.stop_seconds, image.processes


def _vouched(options: ImportOptions) -> str:
    if options.trust:
        return "nobody's signature was asked for"
    return f"signed by a key that {options.signers} lists for uid {options.owner}"


def require_may_own(image: Manifest, owner: int) -> None:
    """Raise :class:`NotAuthorized` unless all of an image would run as the user ``owner``; root may
    own every image.
    """
    if owner == ROOT:
        return
    others = {tree.details.uid for tree in image.trees if tree.details is not None} - {owner}
    if others:
        raise NotAuthorized(
            f"the image is of a program of uid {min(others)}, and uid {owner} cannot own it",
            hint="import it as root, for whom it may be restored",
        )
    require_may_restore(image, owner)


def _restorable(
    node: Node, found: PortableImage, cancellation: Cancellation | None
) -> Iterator[Check]:
    """Yield the checks whether the image could be restored here, as far as its manifest tells."""
    yield from same_machine(found.image, node.criu, node.config.runtime_dir)
    yield "GPUs", partial(require_places, found.image)
    yield "files", partial(_require_files, found.image, cancellation)


def _require_files(image: Manifest, cancellation: Cancellation | None) -> None:
    """Raise :class:`Unsupported` for programs, libraries and other files that are not here, or are
    others. A process of their user's looks at them.
    """
    for tree in saved_trees(image, Path()):
        details, user = tree.details, tree.user
        orders = Orders(
            uid=user.uid,
            gid=user.gid,
            groups=user.groups,
            mark="",
            policy=Policy.CUT,
            open_files=_not_saved(details, checkable(details)),
            mapped_files=_not_saved(details, details.mapped_files),
            outputs_made=made_if_missing(msgspec.structs.replace(details, imported=True)),
        )
        file_worker.require_usable(file_worker.work(orders, cancellation=cancellation))


def _not_saved(details: CpuDetails, files: Iterable[_File]) -> tuple[_File, ...]:
    """Return those of the files that a restore does not bring along."""
    saved = {file.path for file in details.written_files}
    return tuple(file for file in files if file.path not in saved)


def _of_this_store(
    node: Node,
    found: PortableImage,
    writer: ImageWriter,
    places: dict[int, ChunkRef],
    owner: int,
) -> Manifest:
    """Return the manifest of the image in this store.

    It is as old as it is here, for whoever deletes old ones. Cgroups and audit identities are those
    of the machine that it was made on; here others may have their names. So may processes, if it
    says that it is of this boot: nothing else would tell it from theirs.
    """
    replace = msgspec.structs.replace
    host = found.image.host
    if host.boot_id == procfs.boot_id():
        host = replace(host, boot_id="")
    trees = []
    for tree in found.image.trees:
        assert tree.details is not None  # it was checked
        details = replace(tree.details, cgroups=None, declared=None, imported=True, loginuid=None)
        trees.append(replace(tree, files=writer.seal(tree.folder, once=WRITTEN), details=details))
    name = found.image.name
    return replace(
        image_with(found, places),
        id=writer.id,
        origin=found.image.origin or found.image.id,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        owner=owner,
        host=host,
        trees=tuple(trees),
        number=next_number(name, owner, node.store.list()) if name else 0,
    )

"""Images between stores with different keys: what arrives is what was saved, or nothing is kept."""

import contextlib
import copy
import io
import json
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phosd.client.transfer import Link, Transfer, head_of, send_from, signature_of, write_to
from phosd.engine.criu.images import image_file
from phosd.engine.criu.images.image_file import Field
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.image.manifest import CHUNK, Block, Manifest, Tree
from phosd.engine.image.packs import HEADER
from phosd.engine.image.portable import PortableImage, parsed
from phosd.engine.image.sha256_hints import Sha256Hints
from phosd.engine.image.store import Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.admission import DiskLimits
from phosd.engine.operations.transfer import image_receiver
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.engine.operations.transfer.export_image import export_image
from phosd.engine.operations.transfer.import_image import (
    ImportOptions,
    import_image,
    require_may_own,
)
from phosd.engine.system import procfs
from phosd.errors import (
    Cancelled,
    ImageCorrupt,
    Internal,
    NotAuthorized,
    OutOfSpace,
    PhosError,
    Timeout,
    Unsupported,
)
from phosd.portable import FORMAT, Chunk, Head, packed_map
from phosd.service.api import views
from tests.support import rotation
from tests.support.samples import append, everything, manifest_of

NOBODY = 65534
PREFIX = struct.calcsize("<8sIIQ")
MEMORY = b"\1" * CHUNK + bytes(CHUNK) + b"\2" * CHUNK + b"\1" * CHUNK + os.urandom(8192)
FILES = {
    "pages-1.img": b"\3" * 5000 + bytes(3 * CHUNK) + b"\1" * CHUNK,
    "sub/empty.img": b"",
    "files.img": bytes(8),
}


def core(user: int = 0, capabilities: int = 0, inheritable: int = 0, lacking: int = 0) -> bytes:
    """A file as CRIU writes it of a thread of a user, with these capabilities; its bounding set is
    that of this machine, but for those ``lacking``.
    """
    ids = [Field.of(number, user) for number in range(1, 9)]
    bounding = procfs.credentials(1).bounding & ~lacking
    words = [Field.of(12, word) for word in (bounding & 0xFFFFFFFF, bounding >> 32)]
    sets = [Field.of(9, inheritable), Field.of(10, capabilities), *words]
    creds = image_file.message([*ids, *sets])
    thread = image_file.message([Field.of(10, creds)])
    text = image_file.message([Field.of(5, thread)])
    return bytes(8) + struct.pack("<I", len(text)) + text


def publish(
    store: Store, memory: bytes = MEMORY, user: int = 0, core_file: bytes | None = None
) -> Manifest:
    """Publish an image of this memory, which says of its tree what a restore asks for."""
    with store.begin(user) as writer:
        parts = [memory[at : at + CHUNK] for at in range(0, len(memory), CHUNK)]
        (pack,) = writer.packs(len(parts))
        stored = {part: append(store, writer, pack, part) for part in dict.fromkeys(parts)}
        chunks = tuple(stored[part] for part in parts)
        files = {**FILES, "core-7.img": core(user) if core_file is None else core_file}
        for name, data in files.items():
            path = writer.folder / "criu-0" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        details = CpuDetails(user, user, (), "", "refuse", False, 0, loginuid=1002)
        tree = Tree(7, "criu-0", writer.seal("criu-0"), details)
        block = Block(0, 1, 0x7F0000000000, len(memory), 0, chunks)
        made = manifest_of(writer, [block], [tree])
        (process,) = made.processes
        process = msgspec.structs.replace(process, uid=user, gid=user)
        host = msgspec.structs.replace(made.host, boot_id=procfs.boot_id())
        manifest = msgspec.structs.replace(made, processes=(process,), host=host)
        writer.publish(manifest)
    return manifest


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return Store(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Node]:
    with Node(NodeConfig(tmp_path / "there", tmp_path / "run")) as node:
        yield node


def options(**changes: Any) -> ImportOptions:
    return ImportOptions(**{"owner": 0, "trust": True, "anyway": True, **changes})


def exported(store: Store, image: str, key: Path | None = None) -> bytes:
    file = io.BytesIO()
    with Transfer(lambda link: write_to(link, file, key)) as transfer:
        with CallerStream(transfer.name, os.geteuid(), Progress()) as stream:
            export_image(store, image, stream, Progress())
        transfer.result()
    return file.getvalue()


def sent(
    node: Node,
    work: Callable[[Link], object],
    chosen: ImportOptions,
    progress: Progress | None = None,
) -> Manifest:
    progress = progress or Progress()
    with (
        Transfer(work) as transfer,
        CallerStream(transfer.name, os.geteuid(), progress) as stream,
    ):
        return import_image(node, chosen, stream, progress)


def imported(node: Node, data: bytes, chosen: ImportOptions | None = None) -> Manifest:
    """Import these bytes, whatever they are."""
    return sent(node, lambda link: link.write(data), chosen or options())


def parts(data: bytes) -> tuple[Head, bytes]:
    """Take an exported image apart: its head, and its chunks."""
    file = io.BytesIO(data)
    head = head_of(file, "the image")
    return head, file.read()


def forged(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The image with another manifest."""
    head, rest = parts(data)
    manifest = msgspec.json.decode(head.manifest)
    change(manifest)
    return Head(msgspec.json.encode(manifest), head.signature).packed + rest


def asked_for(node: Node, data: bytes) -> int:
    """Import an image, and return how many of its chunks were sent for that."""
    file = io.BytesIO(data)
    head = head_of(file, "the image")
    with Transfer(lambda link: send_from(link, head, file, "the image")) as transfer:
        with CallerStream(transfer.name, os.geteuid(), Progress()) as stream:
            image = import_image(node, options(again=True), stream, Progress())
        verify(node.store, image.id, Progress())
        return transfer.result().sent_chunks


def nothing_kept(node: Node) -> bool:
    return not everything(node.store.state) and not node.store.reservations


def test_what_arrives_is_what_was_saved(here: Store, there: Node) -> None:
    image = publish(here)
    data = exported(here, image.id)
    head, rest = parts(data)
    found = parsed(head.manifest)
    # Memory has ones, zeros, twos, and the last; the files core, threes, zeros and ones' ends.
    assert len(found.chunks) < len(MEMORY) // CHUNK + 8
    assert len(rest) == sum(chunk.length for chunk in found.chunks)

    file = io.BytesIO(data)
    head = head_of(file, "the image")
    arrived = sent(there, lambda link: send_from(link, head, file, "the image"), options())
    assert there.store.list() == [arrived]
    assert arrived.created > image.created
    verify(there.store, arrived.id, Progress())
    with there.store.open(arrived.id) as opened:
        for name, content in FILES.items():
            descriptor = opened.open_file("criu-0", name)
            with os.fdopen(descriptor, "rb") as saved:
                assert saved.read() == content
        memory = b"".join(
            os.pread(opened.packs[ref.pack], ref.length, ref.offset + HEADER)
            for block in arrived.blocks
            for ref in block.chunks
        )
    assert memory == MEMORY
    # Named by another key, and of the same content to everybody.
    digests = {ref.digest for block in image.blocks for ref in block.chunks}
    assert not digests & {ref.digest for block in arrived.blocks for ref in block.chunks}
    packs = there.store.pack_numbers()
    file.seek(len(head.packed))
    sent(there, lambda link: send_from(link, head, file, "the image"), options(again=True))
    assert there.store.pack_numbers() == packs  # what is equal is stored once
    again = parsed(parts(exported(there.store, arrived.id))[0].manifest)
    assert (again.chunks, again.files, again.blocks) == (found.chunks, found.files, found.blocks)
    assert parts(exported(here, image.id))[0] == parts(data)[0]  # the same bytes each time


class Asking:
    """A phosd that wants these chunks."""

    def __init__(self, wanted: Sequence[int], count: int) -> None:
        self._map = packed_map([number in wanted for number in range(count)])
        self.got = b""

    def read(self, count: int) -> bytes:
        assert count == len(self._map)
        return self._map

    def write(self, data: bytes) -> None:
        self.got += data

    def wait_for_end(self) -> None:
        """It ends at once."""


def test_what_phosd_does_not_want_may_be_missing_from_a_file(here: Store) -> None:
    """It has that from another image, and makes this one: then nothing has failed."""
    data = exported(here, publish(here).id)
    head, rest = parts(data)
    chunks = parsed(head.manifest).chunks
    first, last = chunks[0].length, len(chunks) - 1

    def sends(wanted: Sequence[int], behind: bytes) -> tuple[int, bytes]:
        link: Any = Asking(wanted, len(chunks))
        done = send_from(link, head, io.BytesIO(behind), "bert.phos")
        return done.sent_chunks, link.got.removeprefix(head.packed)

    assert sends([0], rest) == sends([0], rest[:first]) == (1, rest[:first])
    assert sends([0], rest + b"more") == (1, rest[:first])
    assert sends([], b"") == (0, b"")
    for wanted, behind, why in (
        ([0], rest[: first - 1], "ends in the middle"),
        ([0, last], rest[:-1], "ends in the middle"),
        ([last], rest + b"more", "goes on behind the end"),
    ):
        with pytest.raises(ImageCorrupt, match=f"bert.phos {why}"):
            sends(wanted, behind)


def test_what_is_here_already_is_not_stored_again(here: Store, there: Node) -> None:
    data, other = (
        exported(here, publish(here, user=1).id) for _ in range(2)
    )  # of the same content, and another image

    def comes(data: bytes, **chosen: Any) -> tuple[str, int]:
        file = io.BytesIO(data)
        head = head_of(file, "the image")
        with Transfer(lambda link: send_from(link, head, file, "the image")) as transfer:
            with CallerStream(transfer.name, os.geteuid(), Progress()) as stream:
                image = import_image(there, options(**chosen), stream, Progress())
            return image.id, transfer.result().sent_chunks

    first, chunks = comes(data)
    assert chunks > 0
    assert comes(data) == (first, 0)
    assert comes(exported(there.store, first)) == (first, 0), "which has come back"
    more = [comes(data, again=True)[0], comes(data, owner=1)[0], comes(other)[0]]
    assert len({first, *more}) == 4 == len(there.store.list())
    assert comes(other) == (more[-1], 0)


def test_nothing_is_kept_of_what_is_cut_short_or_changed(here: Store, there: Node) -> None:
    data = exported(here, publish(here).id)
    head, _ = parts(data)
    end = PREFIX + len(head.manifest)
    for cut in (0, PREFIX - 1, PREFIX + 9, end - 1, end, end + 17, end + CHUNK, len(data) - 1):
        with pytest.raises(Cancelled):
            imported(there, data[:cut])
        assert nothing_kept(there), cut
    for place in (0, 9, PREFIX, PREFIX + 40, end, end + 6000, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 4
        with pytest.raises(PhosError) as raised:
            imported(there, bytes(changed))
        assert isinstance(raised.value, ImageCorrupt | Unsupported), (place, raised.value)
        assert nothing_kept(there), place
    imported(there, data)


def test_other_formats_are_refused_by_name(here: Store, there: Node) -> None:
    data = bytearray(exported(here, publish(here).id))
    newer = struct.pack("<I", FORMAT + 1)
    with pytest.raises(Unsupported, match=f"a newer phosd, format {FORMAT + 1}") as raised:
        imported(there, bytes(data[:8] + newer + data[12:]))
    assert raised.value.reason == "other-format"
    for change in (
        lambda manifest: manifest.update(format=FORMAT + 1, more="things"),
        lambda manifest: manifest["image"].update(format=2, phosd="9.9"),
        lambda manifest: manifest["image"].update(phosd="9.9", more="things"),
    ):
        with pytest.raises(Unsupported, match=r"a newer phosd|by phosd 9.9"):
            imported(there, forged(bytes(data), change))
    assert nothing_kept(there)


def _file(path: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][0][0][0] = path

    return change


def _image(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["image"].update(changes)


def _process(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["image"]["processes"][0].update(changes)


def _details(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["image"]["trees"][0]["details"].update(changes)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above": _file("../../../../etc/passwd"),
    "a file from the root": _file("/etc/passwd"),
    "a file that is the manifest": lambda m: m["image"]["trees"][0].update(folder="."),
    "a folder above": lambda m: m["image"]["trees"][0].update(folder="criu-0/.."),
    "a file within a file": _file("pages-1.img/x"),
    "a file twice": lambda m: m["files"][0].append(m["files"][0][0]),
    "a core file that nobody looks at": _file("sub/core-7.img"),
    "a core file of another name": _file("core-07.img"),
    "a file that is too large": lambda m: m["files"][0][0].__setitem__(1, 1 << 60),
    "a file of chunks that are not there": lambda m: m["files"][0][0].__setitem__(2, [10**9]),
    "a negative chunk": lambda m: m["files"][0][0].__setitem__(2, [-1]),
    "a chunk twice": lambda m: m["chunks"].append(m["chunks"][0]),
    "a chunk for nothing": lambda m: m["chunks"].append(["0" * 64, 5]),
    "a huge chunk": lambda m: m["chunks"][0].__setitem__(1, 1 << 40),
    "an empty chunk": lambda m: m["chunks"][0].__setitem__(1, 0),
    "no digest": lambda m: m["chunks"][0].__setitem__(0, "../x"),
    "no chunks of a block": lambda m: m["blocks"].clear(),
    "chunks in packs": lambda m: m["image"]["blocks"][0].update(chunks=[["0" * 32, 0, 0, CHUNK]]),
    "a block that is larger": lambda m: m["image"]["blocks"][0].update(size=1 << 43),
    "a block in no process": lambda m: m["image"]["blocks"][0].update(process=9),
    "no tree": _image(trees=[]),
    "a tree without a root": lambda m: m["image"]["trees"][0].update(root=8),
    "no details": lambda m: m["image"]["trees"][0].update(details=None),
    "no time": _image(created="yesterday"),
    "no mode": _image(mode="root"),
    "a count that no bus takes": _image(wrong_guesses=1 << 40),
    "a huge number": _image(load_order=[1 << 70]),
    "an id above": _image(id="../../x"),
    "an origin above": _image(origin="../../x"),
    "a parent": _image(parent="20260101T000000-0000"),
    "a name that is none": _image(name="../x"),
    "a user that is none": _process(uid=1 << 32),
    "a pid that is none": _process(pid=0),
    "a long command": _process(command=["x" * 20_000]),
    "outputs without end": _details(
        open_files=[
            {"pid": 7, "descriptor": 1, "path": f"/{n}", "flags": 1, "size": 0, "mtime_ns": 0}
            for n in range(3)
        ]
    ),
    "a text without end": _image(why="x" * 9000),
    "another user in the details": _details(uid=-2),
    "something unknown": _image(more=1),
    "another type": _image(processes={}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what: str, hostile: tuple[bytes, Node]) -> None:
    data, there = hostile
    with pytest.raises(ImageCorrupt):
        imported(there, forged(data, HOSTILE[what]))
    assert nothing_kept(there)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[bytes, Node]]:
    folder = tmp_path_factory.mktemp("hostile")
    here = Store(folder / "here")
    data = exported(here, publish(here).id)
    with Node(NodeConfig(folder / "there", folder / "run")) as node:
        yield data, node


def test_an_image_of_others_is_not_ones_own(here: Store) -> None:
    found = parsed(parts(exported(here, publish(here).id))[0].manifest).image

    def of(user: int, details: int) -> Manifest:
        (process,), (tree,) = found.processes, found.trees
        assert tree.details is not None
        replace = msgspec.structs.replace
        process = replace(process, uid=user, gid=NOBODY)
        told = replace(tree.details, uid=details, gid=NOBODY)
        return replace(found, processes=(process,), trees=(replace(tree, details=told),))

    require_may_own(of(NOBODY, NOBODY), NOBODY)
    for user, details in ((0, NOBODY), (NOBODY, 0), (1, 1)):
        with pytest.raises(NotAuthorized):
            require_may_own(of(user, details), NOBODY)


def test_a_user_gets_the_rights_of_a_user(here: Store, there: Node) -> None:
    """Whatever CRIU's files say. What says that it is of this boot is of no process here."""
    with pytest.raises(NotAuthorized):
        imported(there, exported(here, publish(here).id), options(owner=NOBODY))
    forged = (
        core(0),
        core(NOBODY, capabilities=1 << 21),
        core(NOBODY, inheritable=1 << 8),
    )
    for forged_core in forged:
        image = publish(here, user=NOBODY, core_file=forged_core)
        with pytest.raises(NotAuthorized):
            imported(there, exported(here, image.id), options(owner=NOBODY))
    for rubbish in (b"", b"rubbish, and not a little", core(NOBODY)[:-9]):
        image = publish(here, user=NOBODY, core_file=rubbish)
        with pytest.raises(Internal):
            imported(there, exported(here, image.id), options(owner=NOBODY))
    assert nothing_kept(there)
    fewer = publish(here, user=NOBODY, core_file=core(NOBODY, lacking=1 << 5))
    arrived = imported(there, exported(here, fewer.id), options(owner=NOBODY))
    assert (arrived.owner, arrived.host.boot_id) == (NOBODY, "")
    (tree,) = arrived.trees
    assert tree.details is not None and tree.details.loginuid is None  # that of somebody else


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("trusted", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    key = (folder / "trusted.pub").read_text()
    (folder / "signers").write_text(f"root {key}")
    (folder / "of-another").write_text(f"nobody {key}")
    return folder


def test_without_trust_a_signature_is_needed(here: Store, there: Node, keys: Path) -> None:
    image, another = publish(here), publish(here, b"\7" * CHUNK)

    def arrives(data: bytes, signers: str = "signers") -> Manifest:
        return imported(there, data, options(trust=False, signers=keys / signers))

    signed = exported(here, image.id, keys / "trusted")
    arrives(signed)
    head, rest = parts(signed)
    of_another = parts(exported(here, another.id, keys / "trusted"))[0].signature
    for_mail = subprocess.run(
        ["ssh-keygen", "-Y", "sign", "-f", str(keys / "trusted"), "-n", "email"],
        input=head.manifest,
        capture_output=True,
        check=True,
    ).stdout
    untrusted = signature_of(head.manifest, keys / "other")
    for signature in (b"", of_another, for_mail, untrusted, b"rubbish", head.signature[:-30]):
        with pytest.raises(NotAuthorized) as raised:
            arrives(Head(head.manifest, signature).packed + rest)
        assert "--trust" in raised.value.hint
    with pytest.raises(NotAuthorized):  # a byte of what is signed
        arrives(Head(head.manifest.replace(b'"x"', b'"y"'), head.signature).packed + rest)
    for signers in ("of-another", "missing"):
        with pytest.raises(NotAuthorized):
            arrives(signed, signers)
    shutil.copy(keys / "signers", keys / "open")
    (keys / "open").chmod(0o666)
    with pytest.raises(NotAuthorized, match="not trusted"):
        arrives(signed, "open")
    assert len(there.store.list()) == 1


def test_what_is_here_is_not_sent(here: Store, there: Node) -> None:
    """Only if it is what it should be: what is known of it is a hint."""
    image = publish(here)
    data = exported(here, image.id)
    found = parsed(parts(data)[0].manifest)
    count, files = len(found.chunks), len(found.chunks) - len(found.in_memory)
    assert asked_for(there, data) == count
    assert asked_for(there, data) == files
    more = exported(here, publish(here, b"\7" * CHUNK + MEMORY).id)
    new = parsed(parts(more)[0].manifest).in_memory
    assert asked_for(there, more) == files + len(new) - len(found.in_memory)
    names = there.store.state / "sha256" / "0"
    known = names.read_bytes()
    assert len(known) == 48 * len(new) and names.stat().st_mode & 0o077 == 0
    for rubbish in (b"", b"\0" * 100, known[:-1], known[:32] + known[48:] + known[32:48]):
        names.write_bytes(rubbish)
        asked_for(there, data)
        assert there.store.list()[-1].blocks == there.store.list()[0].blocks
    assert asked_for(there, data) == files
    damaged = there.store.list()[0].blocks[0].chunks[2]
    with there.store.pack_path(damaged.pack).open("r+b") as pack:
        pack.seek(damaged.offset + HEADER + 7)
        pack.write(b"?")
    assert asked_for(there, data) == files + 1  # and the new image is whole
    assert set(Sha256Hints(here, 0).read()) == {c.sha256 for c in _in_memory(parts(more)[0])}


def _in_memory(head: Head) -> list[Chunk]:
    found = parsed(head.manifest)
    return [found.chunks[number] for number in found.in_memory]


def test_without_room_no_chunk_is_asked_for(here: Store, there: Node) -> None:
    head, _ = parts(exported(here, publish(here).id))
    with pytest.raises(OutOfSpace, match="uid 0"):
        imported(there, head.packed, options(limits=DiskLimits(quota=lambda user: CHUNK)))
    assert nothing_kept(there)


def test_a_disk_that_somebody_else_fills_meanwhile(here: Store, tmp_path: Path) -> None:
    data = exported(here, publish(here).id)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "phos-test", str(disk)]
    subprocess.run(mount, check=True)
    try:
        with Node(NodeConfig(disk / "state", tmp_path / "run")) as node:
            other = disk / "of-somebody-else"

            def fill(progress: Progress) -> None:
                if progress.phases[-1].name == "receive" and not other.exists():
                    status = os.statvfs(disk)
                    room = status.f_bavail * status.f_frsize
                    with other.open("wb") as file:
                        os.posix_fallocate(file.fileno(), 0, room)

            with pytest.raises(OutOfSpace, match="delete images"):
                sent(node, lambda link: link.write(data), options(), Progress(observer=fill))
            assert other.exists() and nothing_kept(node)
            other.unlink()
            verify(node.store, imported(node, data).id, Progress())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_stuck(here: Store, there: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is received ahead of it, others go on, and what was cancelled ends when it answers."""
    ahead = 2
    data = exported(here, publish(here, os.urandom(16 * CHUNK)).id)
    answers, full = threading.Event(), threading.Event()
    came: list[int] = []
    write, receive = image_receiver._write_all, CallerStream.receive_into

    def stuck(*arguments: Any) -> None:
        answers.wait()
        write(*arguments)

    def counted(stream: CallerStream, view: memoryview) -> None:
        receive(stream, view)
        came.append(len(view))
        if len(came) == ahead + 1:
            full.set()

    monkeypatch.setattr(image_receiver, "_AHEAD", ahead)
    monkeypatch.setattr(image_receiver, "_write_all", stuck)
    monkeypatch.setattr(CallerStream, "receive_into", counted)
    progress = Progress()
    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(sent, there, lambda link: link.write(data), options(), progress)
        assert full.wait(60)
        publish(there.store)
        progress.cancel()
        assert len(came) == ahead + 1 and not importing.done()
        answers.set()
        with pytest.raises(Cancelled):
            importing.result(60)
    assert len(there.store.list()) == 1 and not there.store.reservations


def test_what_is_damaged_is_not_passed_on(here: Store) -> None:
    image = publish(here)
    ref = image.blocks[0].chunks[0]
    pack = here.pack_path(ref.pack)
    with pack.open("r+b") as file:
        file.seek(ref.offset + HEADER + 77)
        file.write(b"\0")
    with pytest.raises(ImageCorrupt, match="is not what was saved"):
        exported(here, image.id)


def test_a_byte_now_and_then_does_not_make_it_longer() -> None:
    over = threading.Event()

    def trickle(link: Link) -> None:
        while not over.wait(0.05):
            link.write(b"x")

    with (
        Transfer(trickle) as transfer,
        CallerStream(transfer.name, os.geteuid(), Progress(), within=0.5) as stream,
        pytest.raises(Timeout, match="takes longer than 0 s"),
    ):
        stream.receive(200)  # for ten seconds
    over.set()


def test_the_other_side_may_leave_or_fall_silent(here: Store, there: Node) -> None:
    image = publish(here)

    def leaves(link: Link) -> None:
        link.read(PREFIX)

    with (
        Transfer(leaves) as transfer,
        CallerStream(transfer.name, os.geteuid(), Progress()) as stream,
        pytest.raises(Cancelled),
    ):
        export_image(here, image.id, stream, Progress())
    with ExitStack() as stack:
        transfer = stack.enter_context(Transfer(lambda link: link.wait_for_end()))
        stream = stack.enter_context(
            CallerStream(transfer.name, os.geteuid(), Progress(), patience=0.1)
        )
        with pytest.raises(Timeout):
            import_image(there, options(), stream, Progress())
    cancelled = Progress()
    cancelled.cancel()
    with (
        Transfer(lambda link: link.wait_for_end()) as transfer,
        CallerStream(transfer.name, os.geteuid(), cancelled) as stream,
        pytest.raises(Cancelled),
    ):
        import_image(there, options(), stream, cancelled)
    here.delete(image.id)  # nobody holds it any more
    assert nothing_kept(there)


def test_only_who_has_called_is_sent_anything(here: Store) -> None:
    with Transfer(lambda link: None) as transfer, pytest.raises(NotAuthorized):
        CallerStream(transfer.name, os.geteuid() + 1, Progress())


def test_a_manifest_of_a_large_image_is_small(here: Store) -> None:
    """A manifest for 8 GPUs of 141 GB must fit into the limits: a chunk takes some 90 bytes."""
    image = publish(here)
    found = parsed(parts(exported(here, image.id))[0].manifest)
    assert isinstance(found, PortableImage)
    assert len(msgspec.json.encode(found.chunks[0])) < 80


def test_what_is_no_image_is_named() -> None:
    for text, said in ((b"", "it is empty"), (b"PHOS", "it ends"), (b"x" * 99, "it is not the")):
        with pytest.raises(ImageCorrupt, match=f"^{said}"):
            head_of(io.BytesIO(text), "it")


_NASTY = (None, True, -1, 0, 7, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 1.5, 1e308, "", "x", "../x")
_NASTIER: tuple[object, ...] = (
    "/x",
    "\0",
    "x" * 9000,
    "é" * 3000,
    "\ud800",
    [],
    {},
    [[]],
    [0] * 1000,
    ["x"],
    [[0, 0]],
)


def test_what_is_not_refused_can_be_shown(
    hostile: tuple[bytes, Node],
) -> None:
    head, _ = parts(hostile[0])
    whole = msgspec.json.decode(head.manifest)
    accepted = 0
    for seed in rotation.seeds("hostile manifests", 1500, 5000):
        source = random.Random(seed)
        manifest = copy.deepcopy(whole)
        for _ in range(source.randrange(1, 3)):
            at: Any = manifest
            while True:
                keys: Sequence[Any] = list(at) if isinstance(at, dict) else range(len(at))
                key = source.choice(keys)
                if not at[key] or not isinstance(at[key], dict | list) or not source.randrange(4):
                    break
                at = at[key]
            at[key] = copy.deepcopy(source.choice((*_NASTY, *_NASTIER)))
        try:
            image = parsed(json.dumps(manifest).encode()).image
        except (ImageCorrupt, Unsupported):
            continue
        accepted += 1
        shown = (views.created(image), views.root_pid(image), image.owner, image.wrong_guesses)
        assert all(0 <= number < 1 << 63 for number in shown), seed
        assert len("".join((*views.root_command(image), *views.output(image)))) < 40_000, seed
        with contextlib.suppress(NotAuthorized):
            require_may_own(image, NOBODY)
    assert accepted  # one of a hundred is

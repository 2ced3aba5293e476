"""Show one image: its origin, and its content block by block in load order."""

from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import Static

from phosd.client.errors import CommandError
from phosd.client.records import Image, Job
from phosd.tui.actions import Action, bindings
from phosd.tui.node import Contact, Node
from phosd.tui.screens import image_work
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import Cell, bar, command_line, human_bytes, plain, seconds, since, when
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable

_PAGE = 5_000
"""Blocks per call."""
_MOST = 50_000
_MOST_PARENTS = 100
_BAR = 8


@dataclass(frozen=True)
class Content:
    """One block of an image, the ``place``-th in load order. ``gpu`` is -1 for host memory;
    ``shared`` is the part of ``stored`` bytes that an older image holds too.
    """

    place: int
    pid: int
    id: int
    address: int
    size: int
    gpu: int
    chunks: int
    stored: int
    shared: int


class ImageScreen(NodeScreen):
    """The screen of one image."""

    SCOPE = "image"
    TITLE_TEXT = "Image"
    SHOWS = frozenset({Image, Job, Contact})
    BINDINGS = bindings("image")
    DEFAULT_CSS = """
    ImageScreen .facts { height: auto; max-height: 50%; padding: 0 1; background: $boost; }
    """

    def __init__(self, image: Image) -> None:
        super().__init__()
        self._image = image
        self._gone = False
        self._blocks: dict[str, Content] = {}

    def body(self) -> ComposeResult:
        yield Static(classes="facts", markup=False)
        yield Listing(RecordTable(_columns()), "not asked yet")

    def on_mount(self) -> None:
        if "image-blocks" in self.node.manager.features:
            self.query_one(Listing).say("asked, and waiting for the answer")
            self.run_worker(self._read())
        else:
            self.query_one(Listing).say("this phosd does not tell what is in an image")

    async def _read(self) -> None:
        """Read the blocks of the image page by page."""
        listing = self.query_one(Listing)
        try:
            while len(self._blocks) < _MOST:
                first = len(self._blocks)
                rows = await self.node.ask(self._image, "ListBlocks", limit=_PAGE, offset=first)
                found = [Content(first + place, *row) for place, row in enumerate(rows, 1)]
                # A new dict each time: the table may be drawing the old one.
                self._blocks = self._blocks | {f"{block.place:08}": block for block in found}
                listing.show_records(self._blocks)
                if len(rows) < _PAGE:
                    break
        except CommandError as error:
            listing.say(f"{error.code}: {error}")
            return
        listing.say("no device memory is in it")

    def show(self, node: Node) -> None:
        known = node.of(Image).get(self._image.path)
        self._gone = known is None
        self._image = known or self._image
        self.query_one(".facts", Static).update(self._facts())

    def tick(self) -> None:
        super().tick()
        self.show(self.node)

    def _facts(self) -> Text:
        image, now = self._image, self.node.now()
        called = f"{plain(image.name)}@{image.number}, " if image.name else ""
        name = f"{called}{plain(image.id)} of {image.pid} {command_line(image.command)}"
        text = Text.assemble((name, "bold"))
        if self._gone:
            text.append("  (it is deleted)", "bold red")
        made = f"made {when(image.created)}, {since(image.created, now)} ago, by "
        why = f" ({image.why})" if image.why else ""
        wrong = f", {image.wrong_guesses} wrong guesses" if image.wrong_guesses else ""
        chips = ", ".join(f"{chip} {uuid}" for uuid, chip in image.gpus)
        shared = human_bytes(image.shared_bytes) if image.shared_bytes else "none"
        shown = image_work.verified_cell(self, image)
        verified = shown if isinstance(shown, str) else shown[0]
        text.append(
            f"\n{made if image.created else ''}{plain(image.owner_name)}"
            f"\n{human_bytes(image.total_bytes)}, {human_bytes(image.device_bytes)} of it device "
            f"memory; {human_bytes(image.stored_bytes)} stored, {shared} shared with older images"
            f"\nmode {plain(image.mode + why)}{wrong}; stopped for {seconds(image.stop_seconds)}"
            f"\nGPU {plain(chips) or 'none'}; {plain(image.state)}; verified: {verified}"
            f"\nparents: {self._parents()}"
            f"{_crashes(image)}"
            f"{f'{chr(10)}note: {plain(image.note)}' if image.note else ''}",
            "",
        )
        return text

    def _parents(self) -> str:
        """List the parents from the nearest on. Some may be deleted; the limit guards against a
        cycle.
        """
        names: list[str] = []
        image: Image | None = self._image
        while image is not None and image.parent and len(names) < _MOST_PARENTS:
            parent = self.node.image(image.parent)
            names.append(plain(image.parent) + ("" if parent else " (deleted)"))
            image = parent
        return " ← ".join(names) or "none, it stands alone"

    # Actions

    def cannot(self, action: Action) -> str:
        if action.id == "parent":
            if not self._image.parent:
                return "it has no parent"
            return "" if self.node.image(self._image.parent) else "its parent is deleted"
        return "the image is deleted" if self._gone else ""

    def action_restore(self) -> None:
        image_work.restore(self, [self._image])

    def action_restore_with(self) -> None:
        image_work.restore_with(self, self._image)

    def action_verify(self) -> None:
        image_work.verify(self, [self._image])

    def action_rehearse(self) -> None:
        image_work.rehearse(self, [self._image])

    def action_clone(self) -> None:
        image_work.clone(self, self._image)

    def action_note(self) -> None:
        image_work.write_note(self, self._image)

    def action_delete(self) -> None:
        image_work.delete(self, [self._image])

    def action_parent(self) -> None:
        parent = self.node.image(self._image.parent)
        if parent is not None:
            self.app.push_screen(ImageScreen(parent))


def _columns() -> list[Column[Content]]:
    return [
        Column("ORDER", 6, lambda b: str(b.place), lambda b: b.place, right=True),
        Column("PID", 8, lambda b: str(b.pid), lambda b: b.pid, right=True, rank=3),
        Column("BLOCK", 7, lambda b: str(b.id), lambda b: b.id, right=True, rank=2),
        Column("ADDRESS", 15, lambda b: f"{b.address:#x}", lambda b: b.address, right=True),
        Column("GPU", 5, lambda b: "host" if b.gpu < 0 else str(b.gpu), lambda b: b.gpu),
        Column("SIZE", 10, lambda b: human_bytes(b.size), lambda b: b.size, right=True),
        Column("CHUNKS", 7, lambda b: str(b.chunks), lambda b: b.chunks, right=True, rank=1),
        Column("STORED", 10, lambda b: human_bytes(b.stored), lambda b: b.stored, right=True),
        Column("SHARED WITH OLDER IMAGES", 0, _share, lambda b: b.shared),
    ]  # fmt: skip


def _share(block: Content) -> Cell:
    if not block.chunks:
        return "the memory of another row", "dim"
    if not block.shared:
        return "none", "dim"
    share = block.shared / max(block.stored, 1)
    return f"{bar(share, _BAR)} {share:.0%} {human_bytes(block.shared)}"


def _crashes(image: Image) -> str:
    if not image.crashes:
        return ""
    return f"\nits program has crashed soon after its restore, {image.crashes} times in a row"

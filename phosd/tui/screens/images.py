"""Show the images that can be restored."""

from textual.app import ComposeResult
from textual.widgets import Static

from phosd.client.records import Image, Job, Process
from phosd.client.text import WITHIN
from phosd.tui.actions import Action, bindings
from phosd.tui.names import image_cell, image_name
from phosd.tui.node import Node
from phosd.tui.screens import image_work, pool_work
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.image import ImageScreen
from phosd.tui.text import Cell, command_line, human_bytes, plain, seconds, since
from phosd.tui.widgets.listing import UNKNOWN, Listing
from phosd.tui.widgets.table import Column, RecordTable


class ImagesScreen(NodeScreen):
    """The images, newest first."""

    SCOPE = "images"
    TITLE_TEXT = "Images"
    SHOWS = frozenset({Image, Job, Process})
    BINDINGS = bindings("images")
    DEFAULT_CSS = """
    ImagesScreen .about { height: auto; max-height: 3; padding: 0 1; color: $text-muted; }
    """

    def body(self) -> ComposeResult:
        columns: list[Column[Image]] = [
            Column("NAME", 12, image_cell, lambda i: (not i.name, i.name, i.number, i.command),
                   grow=16),
            Column("IMAGE", 22, lambda i: plain(i.id), lambda i: i.id, rank=1),
            Column("AGE", 7, lambda i: since(i.created, self.node.now()),
                   lambda i: -(i.created or 0.0), right=True, rank=2),
            Column(WITHIN, 16, lambda i: plain(i.within), lambda i: i.within, rank=6, grow=20,
                   sparse=True),
            Column("PID", 8, lambda i: str(i.pid), lambda i: i.pid, right=True, rank=7),
            Column("USER", 8, lambda i: plain(i.owner_name), lambda i: i.owner_name, rank=8),
            Column("SIZE", 10, lambda i: human_bytes(i.total_bytes), lambda i: i.total_bytes,
                   right=True),
            Column("STORED", 10, lambda i: human_bytes(i.stored_bytes), lambda i: i.stored_bytes,
                   right=True, rank=5),
            Column("SHARED", 10, _shared, lambda i: i.shared_bytes, right=True, rank=6),
            Column("STOP", 8, lambda i: seconds(i.stop_seconds) if i.stop_seconds else "",
                   lambda i: i.stop_seconds, right=True, rank=9),
            Column("MODE", 10, lambda i: plain(i.mode), lambda i: i.mode, rank=3),
            Column("STATE", 9, _state, lambda i: (i.crashes, i.state), rank=4),
            Column("VERIFIED", 18, lambda i: image_work.verified_cell(self, i),
                   lambda i: (i.whole is None, i.whole, -(i.verified or 0.0))),
            Column("PARENT", 22, lambda i: plain(i.parent), lambda i: i.parent, rank=11),
            Column("COMMAND", 0, lambda i: command_line(i.command), lambda i: i.command,
                   rank=10),
        ]  # fmt: skip
        yield Listing(RecordTable(columns, sort=1, descending=True), UNKNOWN)
        yield Static(classes="about", markup=False)

    @property
    def table(self) -> RecordTable[Image]:
        """The table of images."""
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        nothing = "no images yet; `c` on a process of the first screen makes one"
        listing = self.query_one(Listing)
        listing.say(nothing if node.heard else UNKNOWN)
        listing.show_records(node.of(Image))
        self._show_about()

    def tick(self) -> None:
        super().tick()
        self.table.refresh()

    def _show_about(self) -> None:
        """Show what does not fit into the row."""
        image = self.table.current
        parts = []
        if image is not None:
            if name := image_name(image):
                parts.append(name)
            if image.note:
                parts.append(f"“{image.note}”")
            parts.append(command_line(image.command))
            if image.within:
                parts.append(f"in {image.within}")
            if self.node.process(image.pid) is not None:
                parts.append(f"process {image.pid} runs; a restore needs that it has ended")
            if image.parent:
                gone = "" if self.node.image(image.parent) else " (deleted)"
                parts.append(f"parent {image.parent}{gone}")
            if image.whole is False:
                parts.append("DAMAGED: it cannot be restored; delete it")
            if image.rehearsal_error:
                parts.append(f"its restore was rehearsed, and failed: {image.rehearsal_error}")
        place = self.query_one(".about", Static)
        place.display = bool(parts)
        place.update(plain("; ".join(parts)))

    def on_record_table_moved(self) -> None:
        self._show_about()

    # Actions

    def cannot(self, action: Action) -> str:
        return "" if self.table.chosen else "there is no image"

    def action_restore(self) -> None:
        image_work.restore(self, self.table.chosen)

    def action_restore_with(self) -> None:
        if self.table.current is not None:
            image_work.restore_with(self, self.table.current)

    def action_verify(self) -> None:
        image_work.verify(self, self.table.chosen)

    def action_rehearse(self) -> None:
        image_work.rehearse(self, self.table.chosen)

    def action_clone(self) -> None:
        if self.table.current is not None:
            image_work.clone(self, self.table.current)

    def action_note(self) -> None:
        if self.table.current is not None:
            image_work.write_note(self, self.table.current)

    def action_make_pool(self) -> None:
        if self.table.current is not None:
            pool_work.make(self, self.table.current)

    def action_delete(self) -> None:
        image_work.delete(self, self.table.chosen)

    def action_image_details(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(ImageScreen(self.table.current))


def _state(image: Image) -> Cell:
    return ("crashes", "bad") if image.crashes else plain(image.state)


def _shared(image: Image) -> Cell:
    return human_bytes(image.shared_bytes) if image.shared_bytes else ("none", "dim")

"""Show several nodes: a screen of all of them, and the screens of the one that is chosen there."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.screen import Screen

from phosd.tui.app import SCREENS, PhosApp
from phosd.tui.node import Node
from phosd.tui.screens.nodes import NodesScreen


class FleetApp(PhosApp):
    """The application phos-tui with several nodes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", f"go('{NodesScreen.SCOPE}')", NodesScreen.TITLE_TEXT, priority=True)
    ]
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        NodesScreen.SCOPE: NodesScreen,
        **PhosApp.MODES,
    }
    DEFAULT_MODE = NodesScreen.SCOPE
    titles: ClassVar[dict[str, str]] = {
        NodesScreen.SCOPE: NodesScreen.TITLE_TEXT,
        **PhosApp.titles,
    }
    first_number = 0

    def __init__(self, nodes: Sequence[Node], *, readonly: bool = False, light: bool = False):
        super().__init__(nodes[0], readonly=readonly, light=light)
        self._all = nodes

    @property
    def nodes(self) -> Sequence[Node]:
        return self._all

    async def open_node(self, node: Node) -> None:
        """Go to the first screen of a node. What the screens of another one showed is forgotten,
        and so are its jobs, whose ends would have been told.
        """
        if node is not self.node:
            self.forget_jobs()
            self.node = node
            for screen in SCREENS:
                await self.remove_mode(screen.SCOPE)
                self.add_mode(screen.SCOPE, screen)
        await self.switch_mode(SCREENS[0].SCOPE)

    def action_leave(self) -> None:
        if len(self.screen_stack) == 1 and self.current_mode != NodesScreen.SCOPE:
            self.switch_mode(NodesScreen.SCOPE)
        else:
            super().action_leave()

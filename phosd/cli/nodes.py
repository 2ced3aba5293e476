"""Run a command on another node, or one that lists things on several at once."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from phosd.cli.settings import Settings
from phosd.client.errors import CommandError, Exit
from phosd.client.over_ssh import Tunnel

ON_SEVERAL = frozenset({"status", "ps", "images", "jobs", "gpus", "history", "events"})
"""Commands that may list things of several nodes."""
HERE = frozenset(
    {"run", "wait", "recover", "prune", "export", "import", "push", "pull", "analyse", "doctor"}
    | {"demo", "setup-analysis", "setup-container-runtime", "warm-cache"}
)
"""Commands that need the machine, not only the bus, of phosd."""
_MOST_AT_ONCE = 32
_Cell = str | tuple[str, ...]


@dataclass
class OneOfSeveral(Settings):
    """The settings of one node, which keep the rows until those of all nodes are there."""

    kept: list[tuple[dict[str, Any], dict[str, _Cell]]] = field(default_factory=list)
    """Rows, each with its cells by heading."""
    spare: Sequence[str] = ()
    cut: bool = False

    def rows(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Mapping[str, Callable[[Any], _Cell]],
        spare: Sequence[str] = (),
        *,
        cut: bool = False,
        empty: str = "",
    ) -> None:
        self.spare, self.cut = spare, cut
        self.kept += [(row, {head: of(row) for head, of in columns.items()}) for row in rows]

    def facts(self, facts: Mapping[str, str]) -> None:
        told = "; ".join(f"{name} {text}" for name, text in facts.items() if text)
        self.note(told)

    def say(self, text: str, *, lines: bool = False) -> None:
        if text:
            self.note(text, lines=lines)

    def note(self, text: str, *, lines: bool = False) -> None:
        super().note(f"{self.node}: {text}", lines=lines)


def require_possible(command: str, given: Sequence[str], nodes: Sequence[str]) -> None:
    """Raise :class:`CommandError` unless a command with these arguments can be run on ``nodes``."""
    if command in HERE:
        words = " ".join(("phos", command, *given))
        raise CommandError(
            "Unsupported",
            f"`phos {command}` works on the node itself; log in there: `ssh {nodes[0]} {words}`",
        )
    if len(nodes) > 1 and (command not in ON_SEVERAL or given):
        lists = ", ".join(sorted(ON_SEVERAL))
        raise CommandError(
            "InvalidOption",
            f"only lists are of several nodes ({lists}, without arguments); name one with -H",
        )


def on_each(settings: Settings, act: Callable[[Settings], None]) -> None:
    """Run ``act`` for each node of the settings, at the same time, and print the rows of all of
    them, each with its node. Exits with an error if one failed, which is told.
    """

    def one(node: str) -> tuple[OneOfSeveral, Exit]:
        its = OneOfSeveral(json=settings.json, color=settings.color, nodes=(node,))
        with Tunnel(node, asks=False) as tunnel:
            its.reach(tunnel)
            try:
                act(its)
            except SystemExit as ended:
                return its, Exit(int(ended.code or 0))
            except Exception as caught:
                error = its.error_of(caught)
                settings.tell(error, node=node)
                return its, error.exit
        return its, Exit.DONE

    with ThreadPoolExecutor(min(len(settings.nodes), _MOST_AT_ONCE)) as pool:
        done = list(pool.map(one, settings.nodes))
    _print(settings, [its for its, _ in done])
    exits = {code for _, code in done if code is not Exit.DONE}
    if exits:
        sys.exit(exits.pop() if len(exits) == 1 else Exit.FAILED)


def _print(settings: Settings, found: Sequence[OneOfSeveral]) -> None:
    """Print a table of all nodes' rows, or in JSON each row with its ``node``."""
    if settings.json:
        for each in found:
            for row, _ in each.kept:
                settings.emit({"node": each.node} | row)
        return
    cells = [{"NODE": each.node, **kept} for each in found for _, kept in each.kept]
    heads = dict.fromkeys(head for row in cells for head in row)  # some show more, some less
    if cells:
        settings.rows(
            cells,
            {head: partial(_cell, head) for head in heads},
            max((each.spare for each in found), key=len),
            cut=any(each.cut for each in found),
        )


def _cell(head: str, row: Mapping[str, _Cell]) -> _Cell:
    return row.get(head, "")

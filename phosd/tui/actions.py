"""Define all actions in one table, from which keys, help and command palette are made.

Each action runs the method ``action_<id>`` of its scope's screen or widget. ``key`` may name
several keys, separated by commas.
"""

from dataclasses import dataclass

from textual.binding import Binding, BindingType

from phosd.tui.node import Contact, Node

ANYWHERE = "anywhere"
TABLE = "table"
"""Scope of the actions of every table."""
MOVE = "move"
"""Scope of a table's keys that only move the cursor."""


@dataclass(frozen=True)
class Action:
    """An action in a ``scope``: a screen, or one of the above.

    ``acts`` marks actions that change the node, which ``--readonly`` forbids. ``feature`` is the
    feature that the service must offer. ``shown`` actions are in the line of keys, too.
    """

    id: str
    key: str
    name: str
    help: str
    scope: str
    acts: bool = False
    feature: str = ""
    shown: bool = True
    asks: bool = False
    """The action calls phosd without changing the node."""
    first: bool = False
    """The action runs before the next key is dispatched, which may be meant for what it opens."""


ACTIONS = (
    Action("leave", "q", "Back", "back to where you were, or out of phos-tui", ANYWHERE),
    Action(
        "undo",
        "escape",
        "Undo",
        "all rows again, none marked; then back to where you were",
        ANYWHERE,
        shown=False,
    ),
    Action("theme", "T", "Theme", "light or dark", ANYWHERE, shown=False),
    Action("help", "question_mark", "Help", "the keys of this screen", ANYWHERE),
    # Tables
    Action(
        "mark",
        "space",
        "Mark",
        "mark the row, or unmark it; actions take all marked",
        TABLE,
        shown=False,
    ),
    Action(
        "filter", "slash", "Filter", "only rows with these words; esc shows all", TABLE, first=True
    ),
    Action(
        "order",
        "o",
        "Sort",
        "sort by the next column; also a click on its title",
        TABLE,
        shown=False,
    ),
    Action("reverse", "O", "Reverse", "sort the other way round", TABLE, shown=False),
    Action("unmark", "u", "Unmark", "unmark all rows", TABLE, shown=False),
    Action("move('up')", "up,k", "Up", "the row above", MOVE, shown=False),
    Action("move('down')", "down,j", "Down", "the row below", MOVE, shown=False),
    Action("move('page_up')", "pageup", "Page up", "a page up", MOVE, shown=False),
    Action("move('page_down')", "pagedown", "Page down", "a page down", MOVE, shown=False),
    Action("move('first')", "home,g", "First", "the first row", MOVE, shown=False),
    Action("move('last')", "end,G", "Last", "the last row", MOVE, shown=False),
    # Several nodes
    Action("open_node", "enter", "Open", "the screens of the node", "fleet"),
    # Processes
    Action(
        "checkpoint",
        "c",
        "Checkpoint",
        "save the process; it goes on",
        "processes",
        acts=True,
        feature="checkpoint",
    ),
    Action(
        "checkpoint_with",
        "C",
        "Checkpoint with...",
        "the same, with options asked for first",
        "processes",
        acts=True,
        feature="checkpoint",
        shown=False,
    ),
    Action(
        "schedule",
        "A",
        "Schedule...",
        "save the process again and again, or no longer; how often is asked for first",
        "processes",
        acts=True,
        feature="periodic",
    ),
    Action(
        "migrate",
        "m",
        "Migrate",
        "move the process to another GPU; it goes on",
        "processes",
        acts=True,
        feature="migrate",
    ),
    Action(
        "suspend",
        "s",
        "Suspend",
        "take the process off its GPU, where it stands still; asks first",
        "processes",
        acts=True,
        feature="suspend",
    ),
    Action(
        "swap",
        "S",
        "Swap",
        "of two marked, suspend the one that runs, and resume the other in its place; asks first",
        "processes",
        acts=True,
        feature="swap",
        shown=False,
    ),
    Action(
        "end",
        "E",
        "Save and end",
        "save the process, and end it once its image is on the disk; asks first",
        "processes",
        acts=True,
        feature="then",
        shown=False,
    ),
    Action(
        "recover",
        "b",
        "Recover",
        "resume a process that was left standing still; asks first",
        "processes",
        acts=True,
        feature="recover",
        shown=False,
    ),
    Action("details", "enter", "Details", "blocks, images, jobs and kernels of it", "processes"),
    Action(
        "log",
        "L",
        "Log",
        "follow what its hook noted",
        "processes",
        feature="process-log",
        asks=True,
    ),
    # Jobs, and one job
    Action("job_details", "enter", "Details", "phases, mode and why, wrong guesses", "jobs"),
    *(
        Action(
            "cancel",
            "x",
            "Cancel",
            "stop the job at its next safe point; the program goes on",
            scope,
            acts=True,
        )
        for scope in ("jobs", "job")
    ),
    # Images, and one image
    *(
        action
        for scope in ("images", "image")
        for action in (
            Action(
                "restore",
                "r",
                "Restore",
                "run the program again from where it was, under its old pid",
                scope,
                acts=True,
                feature="restore",
            ),
            Action(
                "restore_with",
                "R",
                "Restore with...",
                "the same, with options asked for first",
                scope,
                acts=True,
                feature="restore",
                shown=False,
            ),
            Action(
                "verify",
                "v",
                "Verify",
                "read every byte again; tell if it is whole",
                scope,
                acts=True,
                feature="verify",
            ),
            Action(
                "rehearse",
                "V",
                "Rehearse",
                "restore it up to the program's first instruction, and end that again",
                scope,
                acts=True,
                feature="rehearsals",
                shown=False,
            ),
            Action(
                "clone",
                "K",
                "Clone...",
                "run it once more beside the program; asks for what its files are called first",
                scope,
                acts=True,
                feature="clones",
            ),
            Action(
                "note",
                "N",
                "Note...",
                "write a line of your own to it",
                scope,
                acts=True,
                feature="image-notes",
                shown=False,
            ),
            Action("delete", "d", "Delete", "remove it for good; asks first", scope, acts=True),
        )
    ),
    Action(
        "make_pool",
        "M",
        "Pool...",
        "keep programs of it ready to be started; asks how many first",
        "images",
        acts=True,
        feature="pools",
        shown=False,
    ),
    Action("image_details", "enter", "Details", "parents, and the content by block", "images"),
    Action("parent", "P", "Parent", "the image that it was saved against", "image"),
    # History
    Action("past_job", "enter", "Details", "phases, mode and why, wrong guesses", "history"),
    Action(
        "filters",
        "f",
        "Which jobs",
        "only those of a process, of a time, of a kind",
        "history",
        feature="history-filters",
    ),
    Action(
        "one_process",
        "p",
        "Process",
        "only the process of the row, or all again",
        "history",
        feature="history-filters",
    ),
    Action("export", "w", "Export", "write the jobs to a file: CSV or JSON", "history", asks=True),
    # GPUs
    Action("gpu(1)", "right,l", "Next GPU", "the GPU after it", "gpus"),
    Action("gpu(-1)", "left,h", "GPU before", "the GPU before it", "gpus", shown=False),
    Action("figure", "n", "Chart", "load, memory, temperature or power", "gpus"),
    Action(
        "evacuate",
        "e",
        "Evacuate",
        "clear the GPU: its processes move or are suspended; shows the plan and asks first",
        "gpus",
        acts=True,
        feature="evacuate",
    ),
    Action("holder", "enter", "Process", "all about the process", "gpus"),
    # Log
    Action("severity", "i", "Severity", "only what matters more, or everything again", "events"),
    Action(
        "read_events",
        "a",
        "Read again",
        "ask phosd for what it noted",
        "events",
        feature="events",
    ),
    # Pools
    Action(
        "start_pooled",
        "B",
        "Start",
        "let a program of the pool run",
        "pools",
        acts=True,
        feature="pools",
    ),
    Action(
        "scale_pool",
        "Z",
        "Size...",
        "how many wait, hollow and ready, and how many there may be",
        "pools",
        acts=True,
        feature="pools",
    ),
    Action(
        "remove_pool",
        "d",
        "Delete",
        "end the pool, and the programs that wait; asks first",
        "pools",
        acts=True,
        feature="pools",
    ),
    # One process
    Action("tab(1)", "right,l", "Next tab", "images, jobs, blocks, kernels", "process"),
    Action("tab(-1)", "left,h", "Tab before", "the other way round", "process", shown=False),
    Action("open", "enter", "Open", "the page of a job", "process"),
    Action(
        "read_again",
        "a",
        "Read again",
        "ask for its blocks and kernels once more",
        "process",
        asks=True,
    ),
    Action(
        "trust",
        "t",
        "Trust",
        "clear the kernel of suspicion: what it writes is told from its arguments again",
        "process",
        acts=True,
        feature="process-kernels",
        shown=False,
    ),
)


_WRITTEN = {
    "escape": "esc",
    "question_mark": "?",
    "slash": "/",
    "pageup": "PgUp",
    "pagedown": "PgDn",
}
_DRAWN = {"enter": "⏎", "left": "←", "right": "→", "up": "↑", "down": "↓"}


def keys_written(action: Action) -> str:
    """Return the action's keys for running text, e.g. ``right, l``."""
    return ", ".join(_WRITTEN.get(key, key) for key in action.key.split(","))


def keys_drawn(action: Action) -> str:
    """Return the action's keys for the screen, e.g. ``→ l``."""
    return " ".join(_DRAWN.get(key, key) for key in keys_written(action).split(", "))


def of(*scopes: str) -> list[Action]:
    """Return the actions of these scopes, in the order of the table."""
    return [action for action in ACTIONS if action.scope in scopes]


def bindings(*scopes: str) -> list[BindingType]:
    """Return the bindings of these scopes, for the ``BINDINGS`` of the class with the methods."""
    return [
        Binding(action.key, action.id, action.name, tooltip=action.help, priority=action.first)
        for action in of(*scopes)
    ]


def named(name: str, scope: str) -> Action | None:
    """Return the action of a scope that runs the method ``action_<name>``."""
    return next((a for a in of(scope) if a.id.partition("(")[0] == name), None)


def why_not(action: Action, node: Node, *, readonly: bool) -> str:
    """Return why the action cannot run now; an empty string if it can."""
    if action.acts and readonly:
        return "phos-tui was started with --readonly; start it without, to act"
    if (action.acts or action.asks or action.feature) and node.contact is not Contact.HERE:
        return "phosd does not answer; it is tried again and again"
    if action.feature and action.feature not in node.manager.features:
        version = node.manager.version or "?"
        return f"phosd {version} does not offer it (no {action.feature!r} in its features)"
    return ""

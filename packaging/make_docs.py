"""Write man pages and shell completions into a folder, or with ``--keys`` update
docs/operate/tui.md.

Whatever could drift is read from its source: commands and options from their parsers, keys from
their table, settings from ``packaging/phosd.toml``. The rest of the pages is in ``docs/man``.
"""

import argparse
import inspect
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from phosd import __version__
from phosd.cli.command import arguments
from phosd.cli.main import GROUPS, named
from phosd.cli.main import main as phos
from phosd.interface.methods import INTERFACES
from phosd.service.api.describe import document
from phosd.service.main import parser as phosd_parser
from phosd.tui.actions import keys_written, of
from phosd.tui.main import main as phos_tui

ROOT = Path(__file__).parents[1]
TUI_PAGE = ROOT / "docs/operate/tui.md"
BEGIN, END = "<!-- keys: python packaging/make_docs.py --keys -->", "<!-- end of keys -->"
COMMANDS = {"phos": phos, "phos-tui": phos_tui}
COMPLETIONS = {"bash": "{}", "zsh": "_{}", "fish": "{}.fish"}
"""File name of a command's completion for each shell."""
SCOPES = {
    "anywhere": "On every screen",
    "table": "In every table",
    "move": "To move in it",
    "fleet": "Several nodes",
    "processes": "Processes",
    "process": "One process",
    "jobs": "Jobs",
    "job": "One job",
    "images": "Images",
    "image": "One image",
    "history": "History",
    "gpus": "GPUs",
    "events": "Log",
    "pools": "Pools",
}


def escape(text: str) -> str:
    """Escape text for troff, so that it is printed verbatim."""
    text = text.replace("\\", "\\(rs").replace("-", "\\-").replace("'", "\\(aq")
    text = text.replace('"', "\\(dq")  # the macros drop those around their arguments
    return re.sub(r"(?m)^\.", r"\\&.", text)


def paragraphs(text: str) -> str:
    r"""Convert click's help to troff paragraphs; those after a ``\b`` keep their line ends."""
    return "\n".join(_paragraph(part) for part in inspect.cleandoc(text).split("\n\n"))


def _paragraph(part: str) -> str:
    if part.startswith("\b\n"):
        return f".PP\n.nf\n{escape(part[2:])}\n.fi"
    return f".PP\n{escape(part)}"


def entry(names: str, text: str) -> str:
    return f".TP\n.B {escape(names)}\n{escape(text)}"


def options(parameters: Iterable[click.Parameter], context: click.Context) -> Iterator[str]:
    """Yield an entry for each option, as ``--help`` shows it."""
    for parameter in parameters:
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option):
            yield entry(*record)


def phos_page(page: str) -> str:
    top = click.Context(phos, info_name="phos")
    shared = {parameter.name for parameter in phos.params}
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines.append(f".SH {title.upper()}")
        for name in group:
            command = named(name)
            context = click.Context(command, info_name=name, parent=top)
            usage = " ".join([name, *command.collect_usage_pieces(context)])
            told = [entry(*argument) for argument in arguments(command)]
            own = [p for p in command.params if p.name not in shared]
            lines += [f".SS {escape(usage)}", paragraphs(command.help or "")]
            lines += [*told, *options(own, context)]
    page = page.replace("@SHARED@", "\n".join(options(phos.params, top)))
    return page.replace("@COMMANDS@", "\n".join(lines))


def phos_tui_page(page: str) -> str:
    top = click.Context(phos_tui, info_name="phos-tui")
    lines = []
    for scope, title in SCOPES.items():
        lines.append(f".SS {title}")
        for action in of(scope):
            lines.append(entry(keys_written(action), action.help))
    page = page.replace("@OPTIONS@", "\n".join(options(phos_tui.params, top)))
    return page.replace("@KEYS@", "\n".join(lines))


def keys_table(page: str) -> str:
    """Replace the tables of keys in a Markdown page, between its markers."""
    lines = []
    for scope, title in SCOPES.items():
        lines += [f"### {title}", "", "| key | action | |", "| --- | --- | --- |"]
        for action in of(scope):
            keys = " ".join(f"`{key}`" for key in keys_written(action).split(", "))
            lines.append(f"| {keys} | {action.name} | {action.help} |")
        lines.append("")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{TUI_PAGE}: there is no place for keys; put back {BEGIN} and {END}")
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n{end}{after}"


def phosd_page(page: str) -> str:
    """Fill in the options of ``phosd``. argparse has no public access to its actions."""
    parser = phosd_parser()
    lines = []
    for action in parser._actions:
        value = f" {action.metavar}" if action.metavar else ""
        text = (action.help or "") % vars(action)
        lines.append(entry(", ".join(action.option_strings) + value, text))
    return page.replace("@OPTIONS@", "\n".join(lines))


def settings_page(page: str) -> str:
    """Fill in the settings: each paragraph of the installed file has a description and a
    setting.
    """
    lines = []
    _, *parts = (ROOT / "packaging/phosd.toml").read_text().strip().split("\n\n")
    for part in parts:
        text = [line.removeprefix("#").strip() for line in part.splitlines()]
        begin = next(n for n, line in enumerate(text) if re.match(r"\w+ = |\[\[", line))
        first, *more = text[begin:]
        lines += [entry(first, " ".join(text[:begin]))]
        if more:
            lines += [".RS", ".PP", ".nf", escape("\n".join(text[begin:])), ".fi", ".RE"]
    return page.replace("@SETTINGS@", "\n".join(lines))


PAGES = {
    "phos.1": phos_page,
    "phos-tui.1": phos_tui_page,
    "phosd.8": phosd_page,
    "phosd.toml.5": settings_page,
}


def pages() -> dict[str, str]:
    """Return the man pages by name."""
    found = {}
    for name, fill in PAGES.items():
        source = (ROOT / "docs/man" / f"{name}.in").read_text()
        found[name] = fill(source).replace("@VERSION@", __version__).replace("@DATE@", date())
    return found


def date() -> str:
    """Return the day of the sources, the same for each build of them: of SOURCE_DATE_EPOCH, or of
    the last commit; empty where there is neither.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        try:
            epoch = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (FileNotFoundError, subprocess.CalledProcessError):
            return ""
    return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%d")


def completion(shell: str, name: str) -> str:
    """Return the completion script of a command for ``shell``."""
    kind = get_completion_class(shell)
    assert kind is not None
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    return kind(COMMANDS[name], {}, name, variable).source()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", help="for man/, completion/ and interfaces/"
    )
    parser.add_argument("--keys", action="store_true", help=f"write the keys into {TUI_PAGE}")
    given = parser.parse_args()
    if given.keys:
        TUI_PAGE.write_text(keys_table(TUI_PAGE.read_text()))
    if given.folder is not None:
        write_all(given.folder)
    elif not given.keys:
        parser.error("name a folder, or --keys")


def write_all(folder: Path) -> None:
    for name, text in pages().items():
        (folder / "man").mkdir(parents=True, exist_ok=True)
        (folder / "man" / name).write_text(text)
    (folder / "interfaces").mkdir(parents=True, exist_ok=True)
    for interface in INTERFACES:
        (folder / "interfaces" / f"{interface.name}.xml").write_text(document(interface))
    for shell, pattern in COMPLETIONS.items():
        (folder / "completion" / shell).mkdir(parents=True, exist_ok=True)
        for name in COMMANDS:
            path = folder / "completion" / shell / pattern.format(name)
            path.write_text(completion(shell, name))


if __name__ == "__main__":
    main()

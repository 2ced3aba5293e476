"""Start ``phos-tui`` from the command line."""

import contextlib
import logging
import os
import platform
import sys

import click

from phosd import __version__
from phosd.client.over_ssh import Tunnel
from phosd.errors import InvalidOption
from phosd.tui.app import PhosApp
from phosd.tui.fleet import FleetApp
from phosd.tui.link import BusLink
from phosd.tui.node import Node


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--bus",
    metavar="session|system|ADDRESS",
    envvar="PHOS_BUS",
    default="system",
    help="The bus that phosd is on (default: system; or PHOS_BUS).",
)
@click.option("--session", "bus", flag_value="session", help="The same as --bus session.")
@click.option(
    "--host",
    "-H",
    "nodes",
    metavar="NODE",
    multiple=True,
    help="Another node, as ssh names it; several for a screen of all of them.",
)
@click.option("--readonly", is_flag=True, help="Show everything, change nothing.")
@click.option("--light", is_flag=True, help="For a light terminal; `T` switches.")
@click.option("--no-color", is_flag=True, help="No colour (also with NO_COLOR set).")
@click.version_option(__version__, prog_name="phos-tui")
def main(bus: str, nodes: tuple[str, ...], readonly: bool, light: bool, no_color: bool) -> None:
    """See every GPU process of a node, and act on it.

    \b
    Keys:
      1 ... 7    the screens: Processes, Jobs, Images, History, GPUs, Log, Pools
      arrows     move; space marks, / filters, o sorts by the next column
      c          checkpoint the process under the cursor, or all that are marked
      enter      more about what is under the cursor
      ?          all keys of the screen       ctrl+p  search in all there is to do here
      q          back, or out

    What cannot be done now is dimmed; its key says why. Everything is a D-Bus call to phosd: you
    can do here what you can do with `phos`.

    \b
    Examples:
      phos-tui
      phos-tui --readonly
      phos-tui -H gpu7
      phos-tui -H gpu7 -H gpu8 -H ann@gpu9
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("phos-tui needs a terminal; `phos status` tells the same in text")
    # Log output of libraries would overwrite the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    if no_color:
        os.environ["NO_COLOR"] = "1"
    with contextlib.ExitStack() as stack:
        found = [_far(stack, node) for node in dict.fromkeys(nodes)]
        if not found:
            found = [Node(BusLink(bus), name=platform.node())]
        if len(found) == 1:
            app = PhosApp(found[0], readonly=readonly, light=light)
        else:
            app = FleetApp(found, readonly=readonly, light=light)
        app.run()


def _far(stack: contextlib.ExitStack, node: str) -> Node:
    """Return another node. It must let ssh in without a question: the screen is taken."""
    try:
        tunnel = stack.enter_context(Tunnel(node, asks=False))
    except InvalidOption as error:
        raise click.UsageError(str(error)) from error
    return Node(BusLink("system", tunnel), name=node, here=False)


if __name__ == "__main__":
    main()

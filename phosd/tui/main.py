"""Start ``phos-tui`` from the command line."""

import logging
import os
import platform

import click

from phosd import __version__
from phosd.tui.app import PhosApp
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
@click.option("--readonly", is_flag=True, help="Show everything, change nothing.")
@click.option("--light", is_flag=True, help="For a light terminal; `T` switches.")
@click.option("--no-color", is_flag=True, help="No colour (also with NO_COLOR set).")
@click.version_option(__version__, prog_name="phos-tui")
def main(bus: str, readonly: bool, light: bool, no_color: bool) -> None:
    """See every GPU process of this node, and act on it.

    \b
    Keys:
      1 ... 6    the screens: Processes, Jobs, Images, History, GPUs, Log
      arrows     move; space marks, / filters, o sorts by the next column
      c          checkpoint the process under the cursor, or all that are marked
      enter      more about what is under the cursor
      ?          all keys of the screen       ctrl+p  search in all there is to do
      q          back, or out

    What cannot be done now is dimmed; its key says why. Everything is a D-Bus call to phosd: you
    can do here what you can do with `phos`.

    \b
    Examples:
      phos-tui
      phos-tui --readonly
      ssh -t node7 phos-tui
    """
    # Log output of libraries would overwrite the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    if no_color:
        os.environ["NO_COLOR"] = "1"
    node = Node(BusLink(bus))
    PhosApp(node, readonly=readonly, light=light, host=platform.node()).run()


if __name__ == "__main__":
    main()

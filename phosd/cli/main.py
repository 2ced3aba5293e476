"""``phos``."""

import click

from phosd import __version__
from phosd.cli.checkpoint import checkpoint
from phosd.cli.demo import demo
from phosd.cli.doctor import doctor
from phosd.cli.evacuate import evacuate
from phosd.cli.events import events
from phosd.cli.history import history
from phosd.cli.images import images
from phosd.cli.jobs import jobs
from phosd.cli.migrate import migrate
from phosd.cli.ps import ps
from phosd.cli.recover import recover
from phosd.cli.restore import restore
from phosd.cli.resume import resume
from phosd.cli.rm import rm
from phosd.cli.run import run
from phosd.cli.settings import shared_options
from phosd.cli.suspend import suspend
from phosd.cli.swap import swap
from phosd.cli.trust import trust
from phosd.cli.verify import verify


class _InOrder(click.Group):
    """Lists the commands in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phos")
@shared_options
def main() -> None:
    """Checkpoint, restore and move GPU programs that know nothing of it.

    \b
    A first try:
      phos doctor                      what this machine can do, and what is missing
      phos run -- python train.py      start a program so that it can be saved
      phos ps                          find its pid
      phos checkpoint 4711             save it; it goes on
      phos images                      what was saved
      phos restore IMAGE               run it again from there, after it ended
      phos migrate 4711 --to 1         or have it go on, on another GPU
      phos suspend 4711                or leave its GPU for a while; `phos resume 4711`

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not authorized, 4 no such thing.
    """


for _command in (
    run,
    ps,
    checkpoint,
    restore,
    images,
    verify,
    rm,
    migrate,
    suspend,
    resume,
    swap,
    evacuate,
    jobs,
    history,
    events,
    doctor,
    trust,
    recover,
    demo,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()

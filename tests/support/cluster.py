"""Provide nodes that are reached by ssh, for which a script stands: it does here what ssh does on
another machine.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.service import Service

_PHOS = (sys.executable, "-m", "phosd.cli.main")
_SSH = """\
#!/bin/sh
echo "$@" >>{said}
while [ "$1" != -- ]; do shift; done
case $2 in
    off) echo "ssh: connect to host off port 22: No route to host" >&2; exit 255 ;;
    bare) echo "sh: 1: $3: not found" >&2; exit 127 ;;
esac
exec "$3" --bus-path={bus}
"""


class Cluster:
    """Nodes with one and the same phosd, of which ``off`` does not answer and ``bare`` lacks the
    bridge.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.ssh = service, folder / "bin" / "ssh"
        self.said = folder / "said"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.variables: dict[str, str] = {}
        self.ssh.parent.mkdir()
        self.ssh.write_text(_SSH.format(said=self.said, bus=service.address))
        self.ssh.chmod(0o755)

    def phos(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the script in place of ssh, and no bus on this machine."""
        variables = self.variables | {
            "PATH": f"{self.ssh.parent}:{os.environ['PATH']}",
            "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent",
            "TMPDIR": str(self.temporary),
        }
        done = subprocess.run(
            [*_PHOS, *words], capture_output=True, text=True, timeout=60, env=os.environ | variables
        )
        assert not list(self.temporary.iterdir()), "a socket is left"
        return done

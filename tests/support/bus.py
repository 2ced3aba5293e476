"""Start a private bus with the default-deny policy of a system bus."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLICY = Path(__file__).parents[2] / "systemd" / "org.phos.conf"

_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus"/>
  </policy>
  <include>{policy}</include>
  <policy context="default">
    <allow own="org.freedesktop.PolicyKit1"/>
    <allow send_destination="org.freedesktop.PolicyKit1"/>
  </policy>
</busconfig>
"""


def start_bus(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a bus open to any user; return it and its address, which a later bus reuses.

    What it has to say, a line for each call of a flood, is in its log and not among the failures of
    tests.
    """
    config, log = folder / "bus.conf", folder / "bus.log"
    config.write_text(_CONFIG.format(socket=folder / "bus", policy=POLICY))
    reading, writing = os.pipe()
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [
                "dbus-daemon",
                f"--config-file={config}",
                "--nofork",
                "--nopidfile",
                f"--print-address={writing}",
            ],
            pass_fds=(writing,),
            stderr=output,
        )
    os.close(writing)
    with os.fdopen(reading) as pipe:
        address = pipe.readline().strip()
    assert address, f"dbus-daemon did not start: {log.read_text()}"
    return daemon, address.partition(",guid=")[0]


@contextmanager
def private_bus(folder: Path) -> Iterator[str]:
    """Run a bus until the end of the block; yields its address."""
    daemon, address = start_bus(folder)
    try:
        yield address
    finally:
        daemon.terminate()
        daemon.wait()


def busctl(address: str, *arguments: str, uid: int | None = None) -> str:
    """Run the real busctl, optionally as another user; return its output. Raises on failure."""
    prefix = (
        ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid is not None else []
    )
    done = subprocess.run(
        [*prefix, "busctl", f"--address={address}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout

"""Measure another user's ``ListProcesses`` beside processes that send phosd what nobody can close.

Each of them connects to ``program.sock`` again and again, and sends a TCP socket whose last close
waits for a minute. The calls are made without them, beside them, without them once more, and beside
as many that do the same to a socket of their own: phosd is not to blame for the processor time
that these take.

As root: ``python -m bench.beside_descriptors [--processes 20] [--calls 300]``. It prints
percentiles in milliseconds, and fails if the 99th beside the attack is above twice that without it,
and above 250 ms.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.bus import private_bus
from tests.system.service.test_end_to_end import phosd

ATTACKER, CALLER = 65533, 65534
_ATTACKS = """
import encodings.idna, os, socket, struct, sys, time
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
server = socket.create_server(("127.0.0.1", 0))
kept = []
def lingering():
    mine = socket.create_connection(server.getsockname())
    kept.append(server.accept()[0])
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    mine.setblocking(False)
    try:
        while True:
            mine.send(bytes(1 << 16))
    except BlockingIOError:
        return mine
mine = lingering()
print("ready", flush=True)
while True:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(sys.argv[2])
        socket.send_fds(connection, [b"x"], [mine.fileno()])
        os.close(mine.detach())
        kept.append(connection)
        mine = lingering()
    except OSError:
        connection.close()
    time.sleep(0.05)
"""
_SINK = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen(128)
print("ready", flush=True)
while True:
    listener.accept()[0].close()
"""
_CALLS = """
import json, os, sys, time
from phosd.client import Client
with Client(sys.argv[2]) as client:
    client.processes()  # imports what others may not be able to read
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
times = []
with Client(sys.argv[2]) as client:
    for _ in range(int(sys.argv[3])):
        begin = time.monotonic()
        client.processes()
        times.append(time.monotonic() - begin)
        time.sleep(0.01)
print(json.dumps(times))
"""


def percentiles(bus: str, calls: int) -> tuple[float, float]:
    """The median and the 99th percentile of calls of another user, in milliseconds."""
    words = [sys.executable, "-c", _CALLS, str(CALLER), bus, str(calls)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    times = sorted(json.loads(done.stdout))
    return 1e3 * times[len(times) // 2], 1e3 * times[min(len(times) - 1, len(times) * 99 // 100)]


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[None]:
    """A program that prints a line when it has begun, until the end of the block."""
    words = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def attacked(target: Path, processes: int) -> Iterator[None]:
    """So many attackers of a socket, until the end of the block."""
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(running(_ATTACKS, str(ATTACKER), str(target)))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    os.environ.setdefault("PHOS_GPU", "soft")
    with tempfile.TemporaryDirectory(prefix="phos-bench-") as name:
        place = Path(name)
        for folder in (place, place / "gpu", place / "run", place / "bus"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        os.environ["PHOS_SOFTGPU_DIR"] = str(place / "gpu")
        with private_bus(place / "bus") as bus, phosd(bus, place):
            percentiles(bus, 20)  # phosd has loaded what it needs
            before = percentiles(bus, given.calls)
            with attacked(place / "run/program.sock", given.processes):
                beside = percentiles(bus, given.calls)
            after = percentiles(bus, given.calls)
            (place / "open").mkdir()
            (place / "open").chmod(0o777)
            sink = str(place / "open" / "sink")
            with running(_SINK, sink), attacked(Path(sink), given.processes):
                elsewhere = percentiles(bus, given.calls)
    for what, (median, most) in (
        ("before", before),
        ("beside", beside),
        ("after", after),
        ("beside as many that attack another socket", elsewhere),
    ):
        print(f"{what:42} median {median:7.1f} ms   99th percentile {most:7.1f} ms")
    if beside[1] > max(2 * max(before[1], after[1]), 250):
        sys.exit("another user waits longer beside the attack")


if __name__ == "__main__":
    main()

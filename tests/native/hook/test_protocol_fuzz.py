"""Messages that no phosd would send reach the hook of a running program: it computes on."""

import os
import random
import socket
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.places import socket_path
from phosd.engine.hook_client.wire import HEADER, MAGIC, VERSION, Type
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from tests.support.harness import Target, start, undisturbed, wait_until

MESSAGES = 3000
BOUNDARIES = (0, 1, 7, 8, 24, 127, 128, 129, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0xFFFFFFFF)


def message(chance: random.Random) -> tuple[bytes, int]:
    """Bytes for the wire, and how many descriptors go with them: one message a connection, and so
    none that is in order could stop the program.
    """
    payload = chance.randbytes(chance.choice((0, 4, 8, 16, 24, 64, 1000)))
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(1, 200)), 0
    length = len(payload) if chance.random() < 0.7 else chance.choice(BOUNDARIES)
    count = chance.choice((0, 0, 1, 2, 100))
    told = count if chance.random() < 0.7 else chance.choice(BOUNDARIES)
    kind = (
        chance.choice((*Type, 0, max(Type) + 1, 0x8001, 0xFFFF))
        if chance.random() < 0.9
        else Type.ARM
    )
    header = HEADER.pack(
        MAGIC if chance.random() < 0.95 else chance.randrange(1 << 32),
        VERSION if chance.random() < 0.95 else 2,
        # A detached hook has no socket; a fuzzer that asks for it finds nothing more.
        kind if kind != Type.DETACH else Type.STATS,
        chance.randrange(1 << 32),
        chance.choice(BOUNDARIES),
        length,
        told,
    )
    whole = header + payload
    return whole[: chance.randrange(len(whole))] if chance.random() < 0.1 else whole, count


def test_the_hook_takes_no_rubbish(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Node(NodeConfig(state_dir=tmp_path / "state", runtime_dir=runtime)) as node:
        target = start("single", tmp_path, runtime=runtime)
        try:
            target.wait_for_steps(2)
            fuzz(target, runtime)
            with HookLink(target.pid, runtime) as link:
                assert link.hello().pid == target.pid
            checkpoint(node, target.pid, CheckpointOptions(mode="concurrent"), Progress())
            target.more_steps(2)
        finally:
            target.kill()
    values = target.values()
    assert values.items() <= undisturbed("single", max(values) + 1).items()
    assert target.errors.read_text() == "", "the hook prints in the program"


def fuzz(target: Target, runtime: Path) -> None:
    chance = random.Random(20)
    kinds = [
        os.open("/dev/null", os.O_RDWR),
        os.memfd_create("board", os.MFD_ALLOW_SEALING),
        os.open(runtime, os.O_RDONLY),
        os.eventfd(0),
    ]
    os.ftruncate(kinds[1], 1 << 16)
    path = str(socket_path(runtime, target.pid))
    before = descriptors(target.pid)
    for _ in range(MESSAGES):
        whole, count = message(chance)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as end:
            end.settimeout(5)
            wait_until(partial(connected, end, path), "the hook to take a connection")
            # The hook may have closed the connection at the first bytes.
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(end, [whole], [chance.choice(kinds) for _ in range(count)])
                if chance.random() < 0.5:
                    end.shutdown(socket.SHUT_WR)
                    while end.recv(1 << 16):
                        pass
    for kind in kinds:
        os.close(kind)
    target.more_steps(2)
    wait_until(lambda: descriptors(target.pid) <= before, "the hook to close what it was sent", 10)


def connected(end: socket.socket, path: str) -> bool:
    """False when as many wait as may."""
    try:
        end.connect(path)
    except BlockingIOError:
        return False
    return True


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))

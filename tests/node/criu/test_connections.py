"""A program has both ends of TCP connections, with bytes in flight."""

import os
import shutil
import socket
from collections.abc import Callable
from typing import Any

import pytest

from phosd.engine.criu.images import connection_record
from phosd.errors import Busy, ImageCorrupt, Unsupported
from tests.node.criu.life import USER, Life, in_order, wait_for

TCP_REPAIR = 19

TALKING = """
import os, socket, sys, time
listening = sys.argv[1] == "listens"
family = socket.AF_INET6 if sys.argv[2] == "6" else socket.AF_INET
server = socket.socket(family)
if listening:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("::" if family == socket.AF_INET6 else "127.0.0.1", 0))
server.listen()
# Of a socket for IPv6 the peer may be one for IPv4.
near = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
far, _ = server.accept()
near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (5).to_bytes(8, "little") + bytes(8))
if not listening:
    server.close()
def options(end):
    return [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
            end.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR),
            end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16), end.getsockname(),
            end.getpeername(), os.get_blocking(end.fileno())]
before = options(near), options(far)
if os.fork() == 0:
    near.close()
    server.close()
    count = 0
    while data := far.recv(8):  # it answers each number once
        time.sleep(0.002)
        far.sendall(data)
    os._exit(0)
far.close()
def number(of):
    return of.to_bytes(8, "big")
sent = 0
for sent in range(1, 200):  # as many are always under way, one way or the other
    near.sendall(number(sent))
value = 0
while True:
    found = b""
    while len(found) < 8:
        found += near.recv(8 - len(found))
    value += 1
    assert found == number(value), (found, value)
    sent += 1
    near.sendall(number(sent))
    assert options(near) == before[0], options(near)
    print(value, flush=True)
"""

FULL = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
if os.fork() == 0:
    server.close()
    near.close()
    while not os.path.exists("read"):
        time.sleep(0.01)
    at = 0
    while data := far.recv(1 << 16):
        assert data == bytes((at + n) % 251 for n in range(len(data))), at
        at += len(data)
    with open("found", "w") as file:
        print(at, file=file)
    time.sleep(1000)
far.close()
near.setblocking(False)
pattern = bytes(range(251)) * 1000
sent = 0
try:
    while True:  # until both buffers are full
        sent += near.send(pattern[sent % 251:])
except BlockingIOError:
    pass
with open("sent", "w") as file:
    print(sent, file=file)
near.shutdown(socket.SHUT_WR)
value = 0
while True:
    value += 1
    print(value, flush=True)
    time.sleep(0.01)
"""

LEFT = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
far.sendall(b"last words")
far.close()
value = 0
while True:
    value += 1
    assert near.recv(100, socket.MSG_PEEK) == b"last words"
    print(value, flush=True)
    time.sleep(0.01)
"""

LISTENING = """
import socket, time
# Who listens without SO_REUSEADDR cannot do so again while its connections are not forgotten.
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
def connect():
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    return far, near
for _ in range(3):
    for end in connect():
        end.close()
kept = [connect() for _ in range(3)]
value = 0
while True:
    value += 1
    for far, near in kept:
        far.sendall(b"x")
        assert near.recv(1) == b"x"
    for end in connect():
        end.close()
    print(value, flush=True)
    time.sleep(0.01)
"""

WAITING = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
value = 0
while True:
    value += 1
    print(value, flush=True)
    time.sleep(0.01)
"""


def begin(life: Life, source: str, *words: str) -> None:
    os.chown(life.home, life.uid, life.uid)
    with (life.home / "said").open("w") as said:
        os.fchown(said.fileno(), life.uid, life.uid)
        life.start(source, *words, stderr=said)
    life.counts_on()


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("words", [("listens", "4"), ("closed", "4"), ("listens", "6")])
def test_what_is_under_way_arrives_once(
    lives: Callable[[int], Life], uid: int, words: tuple[str, str]
) -> None:
    life = lives(uid)
    begin(life, TALKING, *words)
    for goes_on in (True, False, True):
        shutil.rmtree(life.images, ignore_errors=True)
        life.dump(leave_running=goes_on)
        if goes_on:
            life.counts_on()
        life.kill()
        restored = life.restore()
        assert in_order(life.counts_on(by=60)), (life.home / "said").read_text()
        restored.settle()


def test_full_buffers_and_the_end_of_what_is_sent(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    begin(life, FULL)
    life.dump()
    life.counts_on()
    life.kill()
    life.restore().settle()
    life.counts_on()
    (life.home / "read").touch()
    wait_for((life.home / "found").exists)
    wait_for(lambda: (life.home / "found").read_text())
    assert (life.home / "found").read_text() == (life.home / "sent").read_text()


def test_the_program_reads_all_of_full_buffers_after_a_checkpoint(
    lives: Callable[[int], Life],
) -> None:
    life = lives(USER)
    begin(life, FULL)
    life.dump()
    life.counts_on()
    (life.home / "read").touch()
    wait_for(lambda: (life.home / "found").exists() and (life.home / "found").read_text())
    assert (life.home / "found").read_text() == (life.home / "sent").read_text()


def test_the_other_end_was_closed(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    begin(life, LEFT)
    life.dump()
    life.kill()
    life.restore().settle()
    assert in_order(life.counts_on())


def test_it_listens_again_where_connections_have_just_ended(
    lives: Callable[[int], Life],
) -> None:
    life = lives(USER)
    begin(life, LISTENING)
    life.dump()
    life.kill()
    life.restore().settle()
    assert in_order(life.counts_on()), (life.home / "said").read_text()


def test_a_connection_that_nobody_accepts_is_refused(life: Life) -> None:
    life.start(WAITING)
    life.counts_on()
    with pytest.raises(Unsupported, match="TCP connection that nobody has accepted yet"):
        life.dump()
    life.counts_on()


def test_a_taken_port_is_named_and_the_restore_works_later(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    begin(life, TALKING, "closed", "4")
    life.dump()
    life.kill()
    port = int(kept(life)[0].ends[0].address[1])
    with socket.socket() as other:
        # In this mode it gets the port even if the connection that has ended keeps it.
        other.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(Busy, match=f":{port}"):
            life.restore()
    life.restore().settle()
    assert in_order(life.counts_on())


def kept(life: Life) -> tuple[Any, ...]:
    assert life.record is not None
    assert life.record.details is not None
    return life.record.details.connections


def test_a_cut_file_of_what_had_arrived_is_found(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    begin(life, TALKING, "closed", "4")
    life.dump()
    life.kill()
    waiting = life.images / connection_record.UNREAD
    assert waiting.stat().st_size == sum(end.unread for each in kept(life) for end in each.ends)
    with waiting.open("r+b") as file:
        file.truncate(1)
    with pytest.raises(ImageCorrupt):
        life.admit()

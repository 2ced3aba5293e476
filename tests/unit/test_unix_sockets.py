"""None of phosd's sockets is made, read or closed past the module that keeps descriptors out.

That each one is safe, tests/system/service/test_lingering.py tries.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import phosd

SOURCES = Path(phosd.__file__).parent

OTHERWISE = {
    "cli/run_command/enclosed.py": ("recvmsg", "receives credentials, when the keeper is known"),
    "engine/criu/kinds/connections.py": ("socket", "duplicates TCP connections"),
    "engine/criu/files/file_worker.py": (
        "socket",
        "is the other process, at the end that phosd gives it",
    ),
    "engine/criu/kinds/reconnection.py": ("listen socket", "TCP"),
    "engine/hook_client/channel.py": ("recvmsg", "receives memory, and judges all that comes"),
    "engine/mover/protocol/connection.py": ("recvmsg", "receives from movers, which are root's"),
    "engine/mover/worker/main.py": ("socket", "takes more connections of phosd's"),
    "engine/program/doors.py": ("socket", "asks duplicates, which another process closes"),
    "engine/program/keeper.py": ("socket", "sets up a network"),
    "engine/system/free_ports.py": ("socket", "TCP"),
    "engine/system/in_root.py": ("socket", "is the other process of places_apart.py, root's"),
    "engine/system/places_apart.py": ("recv_fds", "receives a place from a process of root's"),
    "engine/system/sd_notify.py": ("AF_UNIX socket", "sends to systemd, and receives nothing"),
    "engine/system/sock_diag.py": ("socket", "asks the kernel"),
    "engine/system/sockets.py": ("AF_UNIX", "asks the kernel"),
    "engine/system/unsandboxed.py": (
        "AF_UNIX recv_fds socket",
        "imports nothing; by its unit root alone reaches it",
    ),
    "service/api/page_server.py": ("listen socket", "TCP"),
    "service/jobs/job_log.py": ("AF_UNIX socket", "sends to the journal, and receives nothing"),
    "service/tasks/runtime_checkpoints.py": ("recv_fds", "receives CRIU's folder, from root alone"),
}
"""What modules use of sockets past :mod:`phosd.unix_sockets`, and why they may."""
TAKES_DESCRIPTORS = {
    "engine/mover/client/mover.py": "movers are root's",
    "engine/mover/protocol/endpoint.py": "movers are root's",
    "engine/system/places_apart.py": "the process at the other end is root's",
    "service/tasks/runtime_checkpoints.py": "CRIU's folder comes with a request of root's",
}
"""Modules that make sockets which take descriptors, and why no other user reaches these."""
_RAW = {
    "AF_UNIX",
    "create_unix_connection",
    "create_unix_server",
    "fromfd",
    "listen",
    "open_unix_connection",
    "recv_fds",
    "recvmsg",
    "socketpair",
    "start_unix_server",
}
_MAKERS = {"listening", "pair", "unix_socket"}


@functools.cache
def uses(module: Path) -> list[tuple[str, str, set[str]]]:
    """Each function of a module or an object that is called or imported: of what, its name, and the
    keywords of the call.
    """
    return [*_uses(module)]


def _uses(module: Path) -> Iterator[tuple[str, str, set[str]]]:
    text = module.read_text()
    for node in ast.walk(ast.parse(text)) if "socket" in text or "unix" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            yield of, node.func.attr, {each.arg or "" for each in node.keywords}
        elif isinstance(node, ast.Attribute):
            yield "", node.attr, set()
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield node.module or "", name.name, set()


def modules() -> Iterator[tuple[str, Path]]:
    for module in sorted(SOURCES.rglob("*.py")):
        if module != SOURCES / "unix_sockets.py":
            yield str(module.relative_to(SOURCES)), module


def makers() -> dict[str, bool]:
    """The modules that make sockets by :mod:`phosd.unix_sockets`, and whether with descriptors."""
    found: dict[str, bool] = {}
    for name, module in modules():
        for of, used, keywords in uses(module):
            if of == "unix_sockets" and used in _MAKERS:
                found[name] = found.get(name, False) or "descriptors" in keywords
    return found


def test_no_socket_is_made_elsewhere() -> None:
    found: dict[str, set[str]] = {}
    for name, module in modules():
        for of, used, _ in uses(module):
            if used in _RAW or (of, used) == ("socket", "socket"):
                found.setdefault(name, set()).add(used)
    allowed = {name: {*used.split()} for name, (used, _) in OTHERWISE.items()}
    assert found == allowed, "make, read and close it by phosd.unix_sockets"
    assert {name for name, descriptors in makers().items() if descriptors} == {*TAKES_DESCRIPTORS}

"""What an image says of files is what phosd could have written of them."""

from typing import Any

import msgspec
import pytest

from phosd.engine.criu.kinds import devices, registry
from phosd.engine.image.cpu_manifest import Connection, ConnectionEnd, CpuDetails, MemoryFile
from phosd.errors import ImageCorrupt

_PLAIN = CpuDetails(
    uid=1000, gid=1000, groups=(), privileged="", tcp="refuse", shell_job=False, tied_to_parent=0
)
_SAVED = MemoryFile(path="/dev/shm/board", saved="memory/0", size=4096, mode=0o600)
_DRIVERS = tuple(f"/dev/nvidia{number}" for number in range(devices.MOST_DEVICES + 1))
_END = ConnectionEnd(7, 2, ("127.0.0.1", 5000))


def test_what_phosd_writes_is_sound() -> None:
    details = msgspec.structs.replace(_PLAIN, memory_files=(_SAVED,), devices=_DRIVERS[1:])
    registry.require_sound(details, {"memory/0": 4096})


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"memory_files": (_SAVED,)}, "a file outside of it, or of another size: 'memory/0'"),
        ({"devices": _DRIVERS}, "more devices than a machine has"),
        ({"connections": (Connection((_END, _END)),)}, "TCP connections is not what was saved"),
    ],
)
def test_each_kind_refuses_what_it_never_writes(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ImageCorrupt, match=why):
        registry.require_sound(msgspec.structs.replace(_PLAIN, **said), {"memory/0": 4095})

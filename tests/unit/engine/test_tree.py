"""Process trees of which something cannot be read."""

import os
from pathlib import Path

import pytest

from phosd.engine.program import tree
from phosd.errors import Unsupported


def test_a_process_that_is_closed_even_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pid 1 of a container whose user namespace is another's."""

    def closed(path: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "readlink", closed)
    with pytest.raises(Unsupported, match=f"{os.getpid()} lets nobody look at it.*`phos ps`"):
        tree.scan(os.getpid())


def _process(
    pid: int, own: int, namespace: str, inheritable: int = 0, bounding: int = 1
) -> tree.TreeProcess:
    nobody = (54321,) * 4
    return tree.TreeProcess(
        pid=pid,
        start_time=pid,
        parent=1,
        group=pid,
        session=pid,
        terminal=0,
        dead=False,
        executable="",
        command=(),
        uids=nobody,
        gids=nobody,
        groups=(),
        capabilities=0,
        inheritable=inheritable,
        bounding=bounding,
        seccomp=0,
        threads=(pid,),
        affinity={},
        cgroup="",
        own_ids={pid: own},
        namespace=namespace,
    )


def test_an_id_of_a_namespace_below_is_not_taken_for_one_of_the_root_s() -> None:
    found = tree.ProcessTree((_process(1000, 5, "pid:[1]"), _process(1001, 5, "pid:[2]")))
    assert found.ids == {5: 1000}


def test_what_takes_cap_setpcap_to_give_back_is_for_administrators() -> None:
    plain = _process(7, 7, "")
    assert not tree.ProcessTree((plain, _process(8, 8, ""))).privileged
    able = tree.ProcessTree((plain, _process(8, 8, "", inheritable=1)))
    assert able.privileged.endswith("has inheritable capabilities")
    fewer = tree.ProcessTree((plain, _process(8, 8, "", bounding=0)))
    assert fewer.privileged.endswith("has another bounding set than its root")

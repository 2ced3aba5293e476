"""Images keep the name of their program, and a number."""

import os

import msgspec
import pytest

from phosd.engine.image.name import next_number, valid_name
from phosd.engine.image.validate import check_manifest
from phosd.engine.node.node import Node
from phosd.engine.program.name import VARIABLE, name_of
from phosd.errors import Busy, ImageCorrupt
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import bring_back, save
from tests.support.harness import Target
from tests.support.slurm_cgroup import in_step


@pytest.mark.parametrize(
    ("text", "valid"),
    [("bert", True), ("a.b_c-9", True), ("x" * 63, True), ("x" * 64, False), ("", False)]
    + [
        (text, False)
        for text in ("9x", "-x", "a b", "a/b", "a@1", "ä", "a\n", "20260101T000000-0000")
    ],
)
def test_names_are_told_from_ids_and_pids(text: str, valid: bool) -> None:
    assert valid_name(text) is valid


def test_images_are_numbered_by_name_and_survive_a_restore(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "bert")
    target = start("single")
    monkeypatch.setenv(VARIABLE, "other")
    other = start("single")
    monkeypatch.setenv(VARIABLE, "no name/at all")
    nameless = start("single")
    for each in (target, other, nameless):
        each.wait_for_steps(2)
    images = [save(node, target, "stop") for _ in range(2)]
    with in_step(other.pid, 12):
        images.append(save(node, other, "stop"))
        other.kill()
    assert [i.within for i in images] == ["", "", "Slurm job 12"]
    assert [(i.name, i.number) for i in images] == [("bert", 1), ("bert", 2), ("other", 1)]
    found = save(node, nameless, "stop")
    assert (found.name, found.number) == ("", 0)
    node.store.delete(images[0].id)
    target.kill()
    bring_back(node, target, images[1].id)
    again = save(node, target, "stop")
    assert (again.name, again.number) == ("bert", 3)
    assert next_number("bert", again.owner + 1, node.store.list()) == 1
    for wrong in ({"name": "a/b"}, {"number": -1}):
        with pytest.raises(ImageCorrupt):
            check_manifest(msgspec.structs.replace(again, **wrong), again.id)


def test_no_second_program_of_a_name_is_restored(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them would be saved by the name of both."""

    def named() -> Target:
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, "bert")
            return start("single")

    first = named()
    first.wait_for_steps(2)
    image = save(node, first, "stop")
    first.kill()
    second = named()
    second.wait_for_steps(1)
    with pytest.raises(Busy, match=f"program of image {image.id} runs: pid {second.pid} "):
        bring_back(node, first, image.id)
    second.kill()
    bring_back(node, first, image.id)


def test_who_has_ended_has_no_name() -> None:
    assert name_of(1 << 22) == ""
    assert name_of(os.getpid()) == os.environ.get(VARIABLE, "")

"""``phos rm`` asks before it deletes for good, where there is somebody to ask."""

import pytest
from msgspec.structs import replace

from tests.support.fake_engine import manifest
from tests.support.service import Service
from tests.system.cli.test_client import at_a_terminal, phos


@pytest.fixture
def node(service: Service) -> Service:
    for number in (1, 2):
        image = replace(manifest(f"2026112{number}T000000-abcd"), name="bert", number=number)
        service.engine.stored[image.id] = image
    return service


@pytest.mark.parametrize(("typed", "left"), [("n", 2), ("y", 1)])
def test_it_says_what_is_deleted(node: Service, typed: str, left: int) -> None:
    done = at_a_terminal(node, typed, "rm", "bert@1")
    assert "20261121T000000-abcd: bert@1, of root, made " in done.stderr
    assert "delete this image for good?" in done.stderr
    assert (done.returncode == 0, len(node.engine.stored)) == (typed == "y", left)


def test_several_are_asked_for_once(node: Service) -> None:
    done = at_a_terminal(node, "y", "rm", "bert@1", "20261122T000000-abcd")
    assert done.stderr.count("delete these 2 images for good?") == 1
    assert (done.returncode, node.engine.stored) == (0, {})


def test_nothing_is_asked_of_scripts(node: Service) -> None:
    assert at_a_terminal(node, "n", "rm", "bert@1", "--yes").returncode == 0
    assert phos(node, "rm", "bert@2").returncode == 0
    assert node.engine.stored == {}

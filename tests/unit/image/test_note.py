"""Notes: what can be one, and what a file that is none does to its image, which is nothing."""

import os
from pathlib import Path

import pytest

from phosd.engine.image.note import MOST_CHARACTERS, checked_note
from phosd.engine.image.store import Store
from phosd.errors import InvalidOption, NoSuchImage
from tests.support.samples import publish

CONTENT = b"\1" * 4096


@pytest.mark.parametrize("text", ["x" * MOST_CHARACTERS, "ε → 0, «вдруг»", "a | b; $(c)"])
def test_what_is_a_note(text: str) -> None:
    assert checked_note(f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    ["x" * (MOST_CHARACTERS + 1), "two\nlines", "\x1b[2J", "a\tb", "\u2028a", "\u202eb"],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(InvalidOption, match="can be no note") as caught:
        checked_note(f"a{text}b")
    assert caught.value.args[0].isprintable()


@pytest.mark.parametrize("content", [b"x" * 2000, b"two\nlines", b"\x1b[2J", b"\xff"])
def test_a_file_that_is_no_note_is_told_once_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    store = Store(tmp_path / "state")
    manifest = publish(store, CONTENT)
    path = store.disk.images / manifest.id / "note"
    path.write_bytes(content)
    path.chmod(0o600)
    assert [store.notes(), store.notes()] == [{}, {}]
    assert store.list() == [manifest]
    assert caplog.text.count("without its note") == 1
    store.set_note(manifest.id, "mine")
    assert store.notes() == {manifest.id: "mine"}


def test_a_note_of_others_is_not_read(tmp_path: Path) -> None:
    """Nor is what a link there leads to."""
    store = Store(tmp_path / "state")
    manifest = publish(store, CONTENT)
    path = store.disk.images / manifest.id / "note"
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    path.symlink_to(secret)
    assert store.notes() == {}
    path.unlink()
    path.write_text("open to all")
    path.chmod(0o644)
    assert store.notes() == {}
    store.set_note(manifest.id, "")
    assert not os.path.lexists(path)
    assert secret.read_text() == "a secret"


def test_no_image_no_note(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    for name in ("20261120T153012-3fa9", "../secret", ""):
        with pytest.raises(NoSuchImage):
            store.set_note(name, "a note")

"""Asking hooks for PyTorch's cached memory, when they answer nonsense, late, or not at all."""

import os
import threading
import time
from pathlib import Path

import pytest

from phosd.engine.hook_client.link import BlockFlag, HookBlock, HookLink, Release
from phosd.engine.hook_client.wire import EMPTY_CACHE, Status
from phosd.engine.job.progress import Progress
from phosd.engine.operations import torch_cache
from phosd.engine.operations.torch_cache import release_cached
from phosd.engine.program.group import CheckpointGroup, Member
from phosd.errors import Cancelled
from tests.support.fake_hook import Answer, Request, Script, fake_hook, release

ASK, TELL = EMPTY_CACHE.pack(1, 0), EMPTY_CACHE.pack(0, 0)
GB = 10**9


class Link(HookLink):
    """The job's own connection, which must stay as it is; the process has ever less memory."""

    def __init__(self, runtime: Path, *sizes: int) -> None:
        super().__init__(os.getpid(), runtime)
        self._sizes = list(sizes)

    def list_blocks(self, after: int = 0) -> list[HookBlock]:
        return [HookBlock(1, 0, self._sizes.pop(0), 0, BlockFlag(0))]


def notes(runtime: Path, script: Script, *sizes: int) -> list[str]:
    """What is noted of one process that has so many bytes at first, and then."""
    progress = Progress()
    link = Link(runtime, *sizes)
    group = CheckpointGroup(
        runtime, lambda tree: None, members=[Member(os.getpid(), [0], link, None)]
    )
    with fake_hook(runtime, script):
        release_cached(group, progress)
    assert progress.figures.measured() == (
        {"released_bytes": sizes[0] - sizes[1]} if sizes[1:] else {}
    )
    return progress.notes


def test_it_is_asked_for_once_and_then_looked_at(runtime: Path) -> None:
    seen = []

    def script(request: Request) -> Answer:
        seen.append(request.payload)
        return Answer(release(Release.RELEASED if len(seen) == 4 else Release.ASKED))

    said = notes(runtime, script, 3 * GB, GB)
    assert said == ["PyTorch released 1.9 GiB of cached device memory"]
    assert seen == [ASK, TELL, TELL, TELL]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(release(7)), "sent a release that does not exist (7)"),
        (Answer(release(2)[:-1]), "sent 263 bytes instead of 264"),
        (Answer(release(2) + b"x"), "sent 265 bytes instead of 264"),
        (Answer(release(2), count=1), "that does not fit it"),
        (Answer(b"unknown request", status=Status.BAD_MESSAGE), "unknown request"),
        (Answer(b"not now", status=Status.WRONG_STATE), "not now"),
        (Answer(cut=3), "went away during EMPTY_CACHE"),
        (Answer(release(Release.NONE)), "its hook does not say why"),
        (Answer(release(Release.FAILED)), "its hook does not say why"),
        (Answer(release(Release.FAILED, b"no \x1b[31mway")), "no ?[31mway"),
        (Answer(release(Release.CAPTURING)), "it was capturing a stream"),
    ],
)
def test_whatever_a_hook_answers_the_job_goes_on(runtime: Path, answer: Answer, why: str) -> None:
    (note,) = notes(runtime, lambda _: answer, GB)
    assert note.startswith(f"cached memory of process {os.getpid()} was not released: ")
    assert why in note


def test_there_is_a_limit_to_patience(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cache, "TIMEOUT", 0.3)
    over = threading.Event()

    def silent(_: Request) -> Answer:
        over.wait(30)
        return Answer(cut=0)

    threading.Timer(5, over.set).start()
    began = time.monotonic()
    progress = Progress()
    members = [Member(os.getpid(), [0], Link(runtime, GB), None) for _ in range(3)]
    with fake_hook(runtime, silent):
        release_cached(CheckpointGroup(runtime, lambda tree: None, members=members), progress)
        took = time.monotonic() - began
        over.set()
    assert 0.3 <= took < 4
    assert progress.notes and all("did not answer" in note for note in progress.notes)


def test_the_time_may_end_while_the_hook_is_asked(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cache, "TIMEOUT", 0.5)
    over = threading.Event()

    def slow(request: Request) -> Answer:
        if request.payload == TELL:
            over.wait(30)
        return Answer(release(Release.ASKED))

    threading.Timer(3, over.set).start()
    (note,) = notes(runtime, slow, GB)
    assert "its main thread did not come to it" in note


def test_what_has_no_hook_is_not_asked_and_a_dead_one_is_no_trouble(runtime: Path) -> None:
    progress = Progress()
    gone = Link(runtime, GB)
    members = [Member(1, [0], None, None), Member(os.getpid(), [0], gone, None)]
    release_cached(CheckpointGroup(runtime, lambda tree: None, members=members), progress)
    first, second = progress.notes
    assert first == "cached memory of process 1 was not released: it runs without the hook"
    assert "has no hook" in second


def test_a_job_that_was_cancelled_ends(runtime: Path) -> None:
    progress = Progress()
    progress.cancel()
    group = CheckpointGroup(runtime, lambda tree: None, members=[Member(1, [0], None, None)])
    with pytest.raises(Cancelled):
        release_cached(group, progress)

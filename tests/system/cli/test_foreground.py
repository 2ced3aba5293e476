"""Parts of ``phos run`` in the foreground; the whole: tests/system/service/test_preemption.py."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phosd.cli.run_command.early_signals import EarlySignals
from phosd.cli.run_command.named import keep_command, kept_command
from phosd.cli.run_command.program import read_end, runs_folder, write_end
from phosd.cli.run_command.relay import follow
from phosd.cli.run_command.resuming import changed_since, folder_of, make_folder, resumed
from phosd.cli.settings import Settings
from phosd.client import Image
from phosd.client import Job as JobRecord
from phosd.errors import Internal, NoSuchJob


class Job:
    """A job that counts how often it is cancelled."""

    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1
        raise NoSuchJob("it has just ended")


def test_a_signal_before_anything_has_begun_ends_the_line() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        with pytest.raises(SystemExit) as ended, EarlySignals(on_term=75):
            os.kill(os.getpid(), number)
        assert ended.value.code == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_the_program_begins_is_kept_and_cancels_its_restore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        job: Any = Job()
        with EarlySignals(on_term=75) as early:
            early.begin()
            os.kill(os.getpid(), number)
            assert early.asked == number
            with early.cancelling(job):
                os.kill(os.getpid(), signal.SIGTERM)
                assert (early.asked, job.cancelled) == (number, 1)
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)


class Restored(Job):
    """A restore that is done."""

    def wait(self) -> JobRecord:
        return JobRecord("/org/phos/jobs/1", state="done", result="4711")


def test_a_signal_just_after_the_restore_is_kept_for_the_program() -> None:
    """The client may be about to close then: who asks it hangs, and the program is lost to the
    SIGKILL that follows.
    """
    job: Any = Restored()
    client: Any = SimpleNamespace(restore=lambda _image, **_options: job)
    with EarlySignals(on_term=75) as early:
        program = resumed(Settings(), client, Image("/image"), {}, early)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (program.pid, early.asked, job.cancelled) == (4711, signal.SIGTERM, 0)


@pytest.mark.parametrize("status", [0, 7, -11])
def test_a_program_that_ended_as_soon_as_it_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """It was saved in its last moments, and has ended as it would have; a signal is no such end."""
    monkeypatch.setattr("phosd.cli.run_command.resuming.folder_of", lambda _image: tmp_path)

    def restore(_image: str, **_options: object) -> Job:
        write_end(tmp_path, status)
        raise Internal("the restored program ended at once")

    client: Any = SimpleNamespace(restore=restore)
    with EarlySignals(on_term=75) as early:
        if status < 0:
            with pytest.raises(Internal):
                resumed(Settings(), client, Image("/image"), {}, early)
            return
        program = resumed(Settings(), client, Image("/image"), {}, early)
        assert follow(program, None, early) == status


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a shell's background job
    try:
        with EarlySignals(on_term=75) as early:
            os.kill(os.getpid(), signal.SIGINT)
            assert early.asked == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_folders_of_ours_get_files_of_ours(tmp_path: Path) -> None:
    """A program may have sent its output elsewhere; a file named `end` there is none of ours."""
    image = Image("/image", output=(str(tmp_path / "stdout"),))
    assert folder_of(image) is None
    keep_command(tmp_path, ["python", "train.py"])
    assert folder_of(image) == tmp_path
    assert folder_of(Image("/image")) is None


def test_what_a_program_was_started_with(tmp_path: Path) -> None:
    assert kept_command(tmp_path) is None
    keep_command(tmp_path, ["python", "train.py", "--name=\u00e4"])
    assert kept_command(tmp_path) == ["python", "train.py", "--name=\u00e4"]
    for damaged in ("", "{}", "[", "7"):
        (tmp_path / "command").write_text(damaged)
        assert kept_command(tmp_path) is None
    (tmp_path / "command").unlink()
    os.mkfifo(tmp_path / "command")  # and nobody waits for its other end
    assert kept_command(tmp_path) is None


def test_how_it_ended(tmp_path: Path) -> None:
    end = tmp_path / "end"
    assert read_end(end) is None
    for status in (0, 7, -15):
        write_end(tmp_path, status)
        assert read_end(end) == status
    for damaged in ("", "exit", "exit x", "left 3", "exit 1 2"):
        end.write_text(damaged)
        assert read_end(end) is None
    end.write_text("exit 1\nsignal 9\n")  # appended to by two restores
    assert read_end(end) == -9


def test_files_that_are_newer_than_the_image(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    image = Image("/image", created=script.stat().st_mtime - 10)
    words = ["python", str(script), "--x", "\0", "9" * 5000]
    assert changed_since(image, words) == [str(script)]
    assert changed_since(Image("/image", created=script.stat().st_mtime + 10), words) == []


def test_output_of_another_machine_gets_its_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else is made, wherever the output of the program went."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["python", "train.py"]
    folder = runs_folder() / "20261126T010203-0a1b2c"
    image = Image("/image", output=(str(folder / "stdout"), str(folder / "stderr")))
    make_folder(image, words)
    assert folder_of(image) == folder and kept_command(folder) == words
    assert {path.name for path in folder.iterdir()} == {"command", "stdout", "stderr"}
    (folder / "stdout").write_text("what was said")
    make_folder(image, ["other"])
    assert kept_command(folder) == words and (folder / "stdout").read_text()
    elsewhere = (runs_folder() / "mine", tmp_path / "20261126T010203-0a1b2c", tmp_path)
    for other in elsewhere:
        make_folder(Image("/image", output=(str(other / "sub" / "stdout"),)), words)
        make_folder(Image("/image", output=(str(other / "stdout"),)), words)
    make_folder(Image("/image"), words)
    assert {path.name for path in runs_folder().iterdir()} == {folder.name}
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


def test_sigterm_after_the_end_leaves_the_exit_code() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with EarlySignals(on_term=75) as early:
            early.begin()
            early.end()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)

"""The log: entries of the journal's own protocol, with the job that they are about."""

import asyncio
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.system.log_format import LogFormatter
from phosd.errors import Busy
from phosd.service.jobs.job import Outcome, Task
from phosd.service.jobs.job_log import JOB_ENDED, JournalHandler
from phosd.service.jobs.listener import Listener
from phosd.service.jobs.table import JobTable

Entry = dict[str, str]


class Journal:
    """The listening side: takes entries apart as the protocol says."""

    def __init__(self, address: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(address))
        self.socket.setblocking(False)

    def entries(self) -> list[Entry]:
        """What has come since the last time."""
        found: list[Entry] = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            except BlockingIOError:
                return found
            for descriptor in descriptors:
                assert data == b""
                with pytest.raises(OSError, match="not permitted"):
                    os.pwrite(descriptor, b"x", 0)
                data = os.pread(descriptor, 1 << 24, 0)
                os.close(descriptor)
            found.append(self._parse(data))

    def _parse(self, data: bytes) -> Entry:
        entry = {}
        while data:
            line, _, data = data.partition(b"\n")
            name, equals, value = line.partition(b"=")
            if not equals:
                (length,) = struct.unpack_from("<Q", data)
                value, data = data[8 : 8 + length], data[8 + length :]
                assert data[:1] == b"\n"
                data = data[1:]
            entry[name.decode()] = value.decode()
        return entry


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """It gets what the package logs."""
    listening = Journal(tmp_path / "journal")
    handler = JournalHandler(tmp_path / "journal", logging.NullHandler())
    logger = logging.getLogger("phosd")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield listening
    logger.removeHandler(handler)
    logger.setLevel(before)
    listening.socket.close()


def test_levels_places_and_lines(journal: Journal) -> None:
    log = logging.getLogger("phosd.some.place")
    log.debug("one %d", 1)
    log.warning("two\nlines=\n")
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("three")
    one, two, three = journal.entries()
    assert (one["MESSAGE"], one["PRIORITY"], one["LOGGER"]) == ("one 1", "7", log.name)
    assert (one["CODE_FILE"], one["CODE_FUNC"]) == (__file__, "test_levels_places_and_lines")
    assert (two["MESSAGE"], two["PRIORITY"]) == ("two\\nlines=\\n", "4")
    assert three["PRIORITY"] == "3"
    assert three["MESSAGE"].startswith("three\n    Traceback")
    assert three["MESSAGE"].endswith("\n    ValueError: inside")
    assert one["SYSLOG_IDENTIFIER"] == "phosd"


def test_an_entry_longer_than_a_datagram(journal: Journal) -> None:
    text = "a long line " * 200_000
    logging.getLogger("phosd").info(text)
    (entry,) = journal.entries()
    assert entry["MESSAGE"] == text


def test_what_the_journal_does_not_take_is_said_otherwise(tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("phosd.test.otherwise")
    logger.addHandler(JournalHandler(tmp_path / "nobody", handler))
    logger.warning("still told")
    assert said == ["still told"]


def run(*tasks: Task) -> None:
    """Jobs, one beside the other, to their ends."""

    async def every() -> None:
        table = JobTable(Listener())
        jobs = [table.submit(task, lambda job: None) for task in tasks]
        for job in jobs:
            await table.wait(job)
        await table.close()

    asyncio.run(every())


def task(operation: str, target: str, work: Callable[[Progress], Outcome]) -> Task:
    return Task(operation, target, 0, frozenset((target,)), work)


def test_entries_of_a_job_carry_its_number_and_what_it_is_about(journal: Journal) -> None:
    log = logging.getLogger("phosd.engine")

    def save(_: Progress) -> Outcome:
        log.info("saving")
        return Outcome("20261120T000000-0000")

    def restore(_: Progress) -> Outcome:
        log.info("restoring")
        raise Busy("not now", hint="wait")

    def recover(_: Progress) -> Outcome:
        return Outcome("process 4712 was given back its parked memory, and runs again")

    run(
        task("checkpoint", "4711", save),
        task("restore", "20261119T000000-0000", restore),
        task("recover", "4712", recover),
        task("swap", "4713 4714", lambda _: Outcome("4714")),
    )
    log.info("nobody's")
    by_text = {entry["MESSAGE"].split(",")[0]: entry for entry in journal.entries()}

    def fields(text: str) -> Entry:
        names = ("PHOS_JOB", "PHOS_PID", "PHOS_IMAGE", "MESSAGE_ID", "PRIORITY")
        return {name: by_text[text][name] for name in names if name in by_text[text]}

    about = {"PHOS_JOB": "1", "PHOS_PID": "4711", "PRIORITY": "6"}
    assert fields("saving") == about
    end = {"PHOS_IMAGE": "20261120T000000-0000", "MESSAGE_ID": JOB_ENDED}
    assert fields("job 1") == about | end
    about = {"PHOS_JOB": "2", "PHOS_IMAGE": "20261119T000000-0000", "PRIORITY": "6"}
    assert fields("restoring") == about
    assert fields("job 2") == about | {"MESSAGE_ID": JOB_ENDED, "PRIORITY": "4"}
    about = {"PHOS_JOB": "3", "PHOS_PID": "4712", "PRIORITY": "6"}
    assert fields("job 3") == about | {"MESSAGE_ID": JOB_ENDED}
    assert fields("job 4")["PHOS_PID"] == "4713"
    assert by_text["job 2"]["MESSAGE"].endswith("failed: not now; wait")
    assert fields("nobody's") == {"PRIORITY": "6"}


FORGED = "/home/x\nWARNING phosd.service.api.manager: forged\x1b[31m\r\u202e\x9b"
ESCAPED = r"/home/x\nWARNING phosd.service.api.manager: forged\x1b[31m\r\u202e\x9b"


def failing() -> None:
    try:
        raise FileNotFoundError(2, "gone", FORGED) from ValueError(FORGED)
    except FileNotFoundError:
        logging.getLogger("phosd.test").exception("job 7: %s", FORGED)


def test_no_line_of_a_users_is_in_the_log(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a path nor the text of an error begins a line, or controls a terminal."""
    failing()
    (entry,) = journal.entries()
    message, *further = entry["MESSAGE"].split("\n")
    assert message == f"job 7: {ESCAPED}"
    assert further and all(line.startswith("    ") for line in further)
    assert all(c.isprintable() or c == "\n" for c in entry["MESSAGE"])
    # Whatever another handler has left in the record.
    (record,) = caplog.records
    record.exc_text = FORGED
    assert LogFormatter("%(message)s").format(record) == entry["MESSAGE"]


@pytest.mark.parametrize(
    ("begin", "prefix"),
    [
        ("phosd.service.jobs.job_log.begin()", "WARNING phosd: "),
        ("phosd.engine.mover.worker.main.begin_log(3)", "mover 3: "),
    ],
)
def test_nor_where_the_log_is_no_journal(begin: str, prefix: str) -> None:
    program = f"""
import logging, sys, {begin.rpartition(".")[0]}
{begin}
logging.getLogger("phosd").warning("%s", sys.argv[1])
"""
    text = f"{FORGED}\udcff"  # which is no UTF-8
    done = subprocess.run(
        [sys.executable, "-c", program, text], capture_output=True, check=True, timeout=300
    )
    assert done.stderr.decode() == prefix + ESCAPED + r"\udcff" + "\n"


_PROGRAM = """
import logging, os, sys
from pathlib import Path
from phosd.service.jobs import job_log as logs
logs.SOCKET = Path(sys.argv[1])
status = os.fstat(2)
os.environ["JOURNAL_STREAM"] = sys.argv[2] or f"{status.st_dev}:{status.st_ino}"
logs.begin()
logging.getLogger("phosd").info("where")
"""


@pytest.mark.parametrize(("stream", "to_journal"), [("", True), ("1:2", False), ("x", False)])
def test_only_when_stderr_is_the_journal(tmp_path: Path, stream: str, to_journal: bool) -> None:
    listening = Journal(tmp_path / "journal")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "journal"), stream],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [entry["MESSAGE"] for entry in listening.entries()] == ["where"] * to_journal
    assert done.stderr == ("" if to_journal else "INFO phosd: where\n")
    listening.socket.close()

"""The recipes of docs/operate/recipes.md, with a server that stands in for a cloud."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.system.procfs import process_id
from phosd.service.jobs.options import CheckpointRequest
from tests.support.fake_engine import this_process
from tests.support.harness import PROGRAMS, alive, parse, wait_until
from tests.support.service import Service
from tests.system.service.test_end_to_end import phos, phosd

EXAMPLES = Path(__file__).parents[3] / "examples"
ME = os.getpid()


class Cloud:
    """A metadata service: what it answers, by path, and what it was asked."""

    def __init__(self) -> None:
        self.answers = {"PUT /token": (200, "a token")}
        self.asked: list[tuple[str, dict[str, str]]] = []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                what = f"{self.command} {self.path}"
                headers = {name.lower(): value for name, value in self.headers.items()}
                cloud.asked.append((what, headers))
                code, text = cloud.answers.get(what, (404, "none"))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = answer  # noqa: N815 - names of http.server

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @contextmanager
    def served(self) -> Iterator["Cloud"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud().served() as served:
        yield served


def begin(bus: str, example: str, *words: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(EXAMPLES / example), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {
            "PHOS_BUS": bus,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "http_proxy": "http://127.0.0.1:1",
        }
        | variables,
    )


def end_of(example: "subprocess.Popen[str]") -> tuple[int, str]:
    said, _ = example.communicate(timeout=100)
    return example.returncode, said


@contextmanager
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def shown(pid: int, **changes: object) -> object:
    found = process_id(pid)
    assert found is not None
    return this_process(**({"pid": pid, "start_time": found.start_time} | changes))


def test_a_notice_is_waited_for_and_has_each_program_saved_once(
    service: Service, cloud: Cloud
) -> None:
    """Its URL may be away for a while, and needs a token; children are saved with their parent."""
    service.engine.go.set()
    with child() as pid:
        service.engine.running = [shown(ME), shown(pid)]  # type: ignore[list-item]
        notice = "GET /notice"
        cloud.answers[notice] = (503, "later")
        words = ("--url", f"{cloud.url}/notice", "--token-url", f"{cloud.url}/token")
        options = ("--header", "Metadata: true", "--says", "Preempt", "--every", "0.05")
        waits = begin(service.address, "spot_notice.py", *words, *options, "--grace", "80")
        for answer in ((503, "later"), (404, "none"), (200, "Reboot")):
            cloud.answers[notice] = answer
            before = len(cloud.asked)
            wait_until(lambda: len(cloud.asked) > before + 4, "it to ask again")  # noqa: B023
        assert waits.poll() is None and service.engine.requests == []
        cloud.answers[notice] = (200, '{"EventType": "Preempt"}')
        code, said = end_of(waits)
    assert code == 0, said
    assert f"process {ME} is saved as image-0" in said and "answers 503" in said
    (request,) = service.engine.requests
    assert request == CheckpointRequest(
        then="end", queue=True, callback_deadline=20, without_callbacks=True
    )
    asked = next(headers for what, headers in cloud.asked if what == notice)
    assert asked["x-aws-ec2-metadata-token"] == "a token" and asked["metadata"] == "true"


def test_what_is_not_saved_in_time_runs_on(service: Service) -> None:
    def never(progress: Progress) -> None:
        while not service.engine.go.wait(0.01):
            progress.check()

    service.engine.act = never
    service.engine.running = [shown(ME)]  # type: ignore[list-item]
    code, said = end_of(begin(service.address, "spot_notice.py", "--now", "--grace", "3"))
    assert code == 1
    assert f"process {ME} is not saved in time, and runs on" in said
    assert said.endswith(f"not saved: {ME}\n")
    wait_until(lambda: '"cancelled"' in service.call("ListJobs"), "the job to be cancelled")


def test_without_phosd_each_recipe_says_so() -> None:
    for example, words in (("spot_notice.py", ["--now"]), ("protect.py", [])):
        code, said = end_of(begin("unix:path=/nowhere", example, *words))
        assert code == 1 and "Traceback" not in said
        assert "the programs cannot be listed: " in said and "NoBus" in said


def only(pids: list[int], folder: Path) -> str:
    """A PATH whose `phos ps` lists these alone: this process may have a software GPU by an earlier
    test, and is not to be saved and ended.
    """
    pattern = "|".join(map(str, pids))
    script = f"""#!/bin/sh
phos={Path(sys.executable).parent / "phos"}
[ "$1" = ps ] || exec "$phos" "$@"
"$phos" "$@" | grep -E '"pid": ?({pattern})[,}}]'
"""
    folder.mkdir()
    (folder / "phos").write_text(script)
    (folder / "phos").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_programs_are_protected_and_saved_when_the_machine_goes(bus: str, tmp_path: Path) -> None:
    """Once protected is enough; and what was saved last goes on as if nothing had been."""
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    pids: list[int] = []
    with phosd(bus, tmp_path):
        try:
            for _ in range(2):
                (began,) = phos(bus, tmp_path, "run", "--gpu", "soft", "--detach", "--", *single)
                pids.append(int(str(began["pid"])))
                output = Path(str(began["stdout"]))
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            known = only(pids, tmp_path / "known")
            for _ in range(2):
                protect = begin(bus, "protect.py", "--every", "1h", "--keep", "2", PATH=known)
                code, said = end_of(protect)
                assert code == 0, said
            rows = [row for row in phos(bus, tmp_path, "ps") if row["pid"] in pids]
            assert [row["checkpoint_interval"] for row in rows] == [3600.0, 3600.0]
            assert len(phos(bus, tmp_path, "images")) == 2
            code, said = end_of(begin(bus, "spot_notice.py", "--now", PATH=known))
            assert code == 0, said
            assert not any(map(alive, pids))
            images = phos(bus, tmp_path, "images")
            assert sorted(str(image["pid"]) for image in images[2:]) == sorted(map(str, pids))
            (last,) = [str(image["id"]) for image in images[2:] if image["pid"] == pids[1]]
            before = parse(output.read_bytes())
            phos(bus, tmp_path, "restore", last)
            wait_until(lambda: len(parse(output.read_bytes())) > len(before) + 3, "it to go on")
            steps = [line.split()[0] for line in output.read_bytes().splitlines()[:-1]]
            assert len(steps) == len({*steps}), "nothing is done twice"
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)

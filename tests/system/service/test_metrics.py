"""What Prometheus reads, asked as it asks, while real jobs run."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phosd.service.api import page_server
from phosd.service.api.gauges import Sources
from phosd.service.api.metrics import Metrics
from phosd.service.config import Config
from phosd.service.jobs.listener import Listener
from phosd.service.jobs.table import JobTable
from tests.support.checkout import ROOT
from tests.support.harness import PROGRAMS, parse, running, wait_until
from tests.support.service import phosd as phosd_once
from tests.system.service.test_end_to_end import phos, phos_ended, phosd

PROGRAMS_TOLD = "phosd_programs"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[Sample, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def status(bus: str, folder: Path) -> Counter[str]:
    """How many programs `phos status` counts, by their protection."""
    lines = phos_ended(bus, folder, "--json", "status").stdout.splitlines()
    return Counter(json.loads(line)["protection"] for line in lines)


def protected(port: int) -> Counter[str]:
    """The same of the metrics."""
    words = scrape(port).items()
    return Counter(
        {dict(labels)["protection"]: int(n) for (name, labels), n in words if name == PROGRAMS_TOLD}
    )


@contextmanager
def program(bus: str, folder: Path) -> Iterator[int]:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    (started,) = phos(bus, folder, "run", "--gpu", "soft", "--detach", "--", *single)
    pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
    try:
        wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_metrics_tell_of_real_jobs(bus: str, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "phosd.toml").write_text(f'metrics = "127.0.0.1:{port}"\nrescan_seconds = 0.5\n')
    with phosd(bus, tmp_path), program(bus, tmp_path) as pid:
        before = scrape(port)
        assert before["phosd_images", ()] == 0
        saved = phos(bus, tmp_path, "checkpoint", "--mode", "stop", str(pid))[-1]
        phos(bus, tmp_path, "verify", str(saved["result"]))
        done = (("operation", "checkpoint"), ("state", "done"))
        wait_until(lambda: scrape(port).get(("phosd_jobs_total", done)) == 1, "the job's count")
        now = scrape(port)
        assert now["phosd_jobs_total", (("operation", "verify"), ("state", "done"))] == 1
        mode = (("mode", "stop"),)
        assert now["phosd_stop_seconds_count", mode] == 1
        assert now["phosd_stop_seconds_sum", mode] == pytest.approx(saved["stop_seconds"]) != 0
        assert now["phosd_drained_bytes_total", ()] == saved["drained_bytes"] != 0
        assert now["phosd_drain_seconds_total", ()] > 0
        assert now["phosd_wrong_guesses_total", ()] == 0
        assert now["phosd_images", ()] == 1
        wait_until(lambda: status(bus, tmp_path) == protected(port), "the words of `phos status`")
        assert protected(port)["saved"] >= 1
        stored = sum(f.stat().st_size for f in (tmp_path / "state" / "packs").iterdir())
        stored += sum(f.stat().st_size for f in (tmp_path / "state" / "images").rglob("*.img"))
        assert now["phosd_image_bytes", (("user", "0"),)] == pytest.approx(stored, rel=0.05)
        assert now["phosd_processes", ()] >= 1 + now["phosd_processes_parked", ()]
        assert (now["phosd_jobs_running", ()], now["phosd_jobs_waiting", ()]) == (0, 0)
        wait_until(lambda: scrape(port)["phosd_loop_lag_seconds_count", ()] > 2, "the loop's lag")
        assert now["phosd_processes_suspended", ()] == 0
        phos(bus, tmp_path, "suspend", str(pid))
        wait_until(lambda: scrape(port)["phosd_processes_suspended", ()] == 1, "who is suspended")
        phos(bus, tmp_path, "resume", str(pid))
        # Not ourselves: where a test before this one has used the GPU, this process has it open.
        with running(["sleep", "60"]) as other:
            refused = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "phosd.cli.main",
                    "--bus",
                    bus,
                    "checkpoint",
                    str(other.pid),
                ],
                capture_output=True,
                timeout=60,
            )
            other.kill()
        assert refused.returncode
        failed = (("operation", "checkpoint"), ("state", "failed"))
        wait_until(lambda: scrape(port).get(("phosd_jobs_total", failed)) == 1, "the failure")
        names = {name for _, labels in scrape(port) for name, _ in labels}
        few = {
            "operation",
            "state",
            "mode",
            "user",
            "le",
            "protection",
            "where",
            "version",
            "level",
        }
        assert names == few, "labels are few by nature"


def test_a_port_that_is_taken_is_told(bus: str, tmp_path: Path) -> None:
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        done = start_and_fail(bus, tmp_path, f'metrics = "{address}"\n')
    assert f"metrics cannot be served at {address} (Address already in use)" in done


def test_without_its_package_the_setting_is_refused(bus: str, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "prometheus_client").mkdir(parents=True)
    (hidden / "prometheus_client" / "__init__.py").write_text(
        "raise ModuleNotFoundError('hidden', name='prometheus_client')\n"
    )
    path = os.pathsep.join(filter(None, (str(hidden), os.environ.get("PYTHONPATH"))))
    done = start_and_fail(bus, tmp_path, f'metrics = "127.0.0.1:{free_port()}"\n', PYTHONPATH=path)
    assert "`metrics` is set, and a Python package for it is missing (prometheus_client)" in done
    assert f"install it (`make setup` in {ROOT}), or leave" in done


def start_and_fail(bus: str, folder: Path, config: str, **environment: str) -> str:
    """What phosd says when it does not start."""
    (folder / "phosd.toml").write_text(config)
    done = phosd_once(
        "--session",
        f"--config={folder / 'phosd.toml'}",
        f"--state-dir={folder / 'state'}",
        f"--runtime-dir={folder / 'run'}",
        DBUS_SESSION_BUS_ADDRESS=bus,
        **environment,
    )
    assert done.returncode == 1
    return done.stderr


@contextmanager
def metrics() -> Iterator[int]:
    """Those of a node with nothing on it; the port."""

    async def serve() -> None:
        inventory: Any = SimpleNamespace(processes={}, views={}, images={})
        sources = Sources(JobTable(Listener()), inventory, Config, list)
        served = Metrics(f"127.0.0.1:{port}", sources)
        ready.set()
        await asyncio.to_thread(stop.wait)
        await served.close()

    port, ready, stop = free_port(), threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield port
    finally:
        stop.set()
        thread.join()


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, which it has told nothing."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_connects_and_asks_nothing_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each of them, and all woken at once, held phosd up for more than a minute."""
    with metrics() as port, ExitStack() as stack:
        threads = threading.active_count()
        several = 3 * page_server.CONNECTIONS
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(several)]
        for each in slow:
            stack.enter_context(each)
            with suppress(OSError):
                each.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert scrape(port)["phosd_images", ()] == 0
        assert threading.active_count() <= threads + 1, "one looks at the disk now and then"
        wait_until(lambda: sum(map(ended, slow)) > several - page_server.CONNECTIONS, "their end")
        assert not ended(slow[-1]), "who came last has time to ask"
        with suppress(ConnectionError):
            slow[-1].sendall(b"X-Long: " + b"x" * page_server.REQUEST_BYTES)
        wait_until(lambda: ended(slow[-1]), "the end of who asks too much")
        monkeypatch.setattr(page_server, "TIMEOUT", 0.1)
        with socket.create_connection(("127.0.0.1", port)) as late:
            wait_until(lambda: ended(late), "the end of who asks too late")
        assert scrape(port)["phosd_images", ()] == 0


def test_the_documentation_names_every_metric() -> None:
    with metrics() as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as reply:
            served = reply.read().decode()
    told = re.findall(r"(?m)^# TYPE (\w+) (\w+)$", served)
    page = (Path(__file__).parents[3] / "docs/reference/dbus.md").read_text()
    documented = re.findall(r"(?m)^\| `(phosd_\w+)` \| (\w+) \|", page)
    assert sorted(documented) == sorted(one for one in told if not one[0].endswith("_created"))

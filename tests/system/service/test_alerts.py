"""Each alert fires and clears: a real Prometheus scrapes a real phosd on the software GPU.

The alerts do not wait here until their condition has held for minutes, and no unsaved work is too
little; ``tests/packaging/alerts.yml`` has the rules as they are.
"""

import json
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.test_monitoring import DASHBOARD, RULES
from tests.support.harness import wait_until
from tests.support.rotation import EVERYTHING
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.service.test_metrics import free_port, program

pytestmark = pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs Prometheus")

PROMETHEUS = Path(__file__).parents[3] / "build/prometheus/bin/prometheus"
OFTEN = "1s"


@dataclass
class Watcher:
    """A Prometheus that scrapes the phosd of a folder."""

    port: int
    phosd_port: int
    folder: Path

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)["data"]

    def firing(self) -> set[str]:
        alerts = self.ask("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def wait(self, alert: str, *, firing: bool) -> None:
        wait_until(lambda: (alert in self.firing()) is firing, f"{alert}: {firing}")

    def configure(self, settings: str) -> None:
        """Write phosd's configuration, with which it serves metrics."""
        text = f'metrics = "127.0.0.1:{self.phosd_port}"\nrescan_seconds = 0.5\n{settings}'
        (self.folder / "phosd.toml").write_text(text)


def impatient(folder: Path) -> Path:
    """The rules as a file, without their ``for``, and with no time for ten minutes."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["for"]
        if rule["alert"] == "PhosdSuspendedUnsaved":
            shorter = rule["expr"].replace("600", "0")
            assert shorter != rule["expr"]
            rule["expr"] = shorter
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    found = Watcher(free_port(), free_port(), tmp_path)
    target = f"127.0.0.1:{found.phosd_port}"
    config = {
        "global": {f"{name}_interval": OFTEN for name in ("scrape", "evaluation")},
        "rule_files": [str(impatient(tmp_path))],
        "scrape_configs": [{"job_name": "phosd", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [f"--config.file={tmp_path / 'prometheus.yml'}", "--log.level=warn"]
    words += [f"--storage.tsdb.path={tmp_path / 'db'}"]
    words += [f"--web.listen-address=127.0.0.1:{found.port}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        server = subprocess.Popen([PROMETHEUS, *words], stderr=log)
    try:
        wait_until(lambda: answers(found), "Prometheus")
        yield found
    finally:
        server.terminate()
        server.wait(60)


def answers(watcher: Watcher) -> bool:
    try:
        watcher.ask("alerts")
    except OSError:
        return False
    return True


@contextmanager
def disk_of_its_own(folder: Path) -> Iterator[None]:
    """Mount an empty file system as the state folder."""
    (folder / "state").mkdir()
    options = ["-t", "tmpfs", "-o", "size=8G,mode=0700"]
    subprocess.run(["mount", *options, "phos", folder / "state"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder / "state"], check=True)


def test_a_program_that_is_stopped_is_late(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    with phosd(bus, watcher.folder), program(bus, watcher.folder) as pid:
        phos(bus, watcher.folder, "checkpoint", str(pid), "--every", "2s")
        os.kill(pid, signal.SIGSTOP)
        watcher.wait("PhosdProgramLate", firing=True)
        os.kill(pid, signal.SIGCONT)
        phos(bus, watcher.folder, "checkpoint", str(pid))
        watcher.wait("PhosdProgramLate", firing=False)


def test_a_failed_checkpoint(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    folder = watcher.folder
    with phosd(bus, folder, PHOS_FAULT="checkpoint-publish"), program(bus, folder) as pid:
        with pytest.raises(AssertionError):
            phos(bus, folder, "checkpoint", str(pid))
        watcher.wait("PhosdCheckpointFailed", firing=True)
        phos(bus, folder, "checkpoint", str(pid))
        watcher.wait("PhosdCheckpointFailed", firing=False)


def test_a_full_disk_and_a_used_quota(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    with (
        disk_of_its_own(watcher.folder),
        phosd(bus, watcher.folder) as daemon,
        program(bus, watcher.folder) as pid,
    ):
        phos(bus, watcher.folder, "checkpoint", str(pid))
        wait_until(lambda: bool(watcher.ask("query", query="phosd_image_bytes")["result"]), "it")
        wait_until(lambda: not watcher.firing(), "nothing to fire")
        watcher.configure('min_free = "95%"\n[[limits]]\nquota = "1MiB"\n')
        daemon.send_signal(signal.SIGHUP)
        watcher.wait("PhosdDiskNearlyFull", firing=True)
        watcher.wait("PhosdQuotaNearlyUsed", firing=True)
        watcher.configure('min_free = "1%"\n[[limits]]\nquota = "1TiB"\n')
        daemon.send_signal(signal.SIGHUP)
        watcher.wait("PhosdDiskNearlyFull", firing=False)
        watcher.wait("PhosdQuotaNearlyUsed", firing=False)


def test_what_a_reboot_would_lose(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    with phosd(bus, watcher.folder), program(bus, watcher.folder) as pid:
        phos(bus, watcher.folder, "suspend", str(pid))
        watcher.wait("PhosdSuspendedUnsaved", firing=True)
        phos(bus, watcher.folder, "resume", str(pid))
        watcher.wait("PhosdSuspendedUnsaved", firing=False)
        phos(bus, watcher.folder, "checkpoint", str(pid), "--durable")
        assert "PhosdTrouble" not in watcher.firing()


def test_an_image_that_cannot_be_read(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    folder = watcher.folder
    with phosd(bus, folder), program(bus, folder) as pid:
        saved = phos(bus, folder, "checkpoint", str(pid), "--durable")[-1]["result"]
        manifest = folder / "state/images" / str(saved) / "manifest.json"
        whole = manifest.read_bytes()
        manifest.write_bytes(b"{}")
        phos(bus, folder, "checkpoint", str(pid))
        watcher.wait("PhosdTrouble", firing=True)
        manifest.write_bytes(whole)
        phos(bus, folder, "checkpoint", str(pid))
        watcher.wait("PhosdTrouble", firing=False)


def test_a_phosd_that_is_gone(bus: str, watcher: Watcher) -> None:
    watcher.configure("")
    watcher.wait("PhosdDown", firing=True)
    with phosd(bus, watcher.folder):
        watcher.wait("PhosdDown", firing=False)
    watcher.wait("PhosdDown", firing=True)


def test_each_panel_of_the_dashboard_has_data(bus: str, watcher: Watcher) -> None:
    """From the first scrapes on, before anything is saved."""
    watcher.configure("")

    def without_data() -> list[str]:
        empty = []
        for panel in DASHBOARD["panels"]:
            for query in panel["targets"]:
                text = query["expr"].replace("$node", ".*").replace("$__rate_interval", "1m")
                if not watcher.ask("query", query=text)["result"]:
                    empty.append(f"{panel['title']}: {text}")
        return empty

    with phosd(bus, watcher.folder):
        wait_until(lambda: not without_data(), "data for each panel")

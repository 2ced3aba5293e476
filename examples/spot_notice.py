#!/usr/bin/env python3
"""Save and end all programs that use a GPU, when the machine is about to be taken.

    spot_notice.py --url URL      wait for a notice at URL, such as a cloud's metadata service
    spot_notice.py --now          there is one: whoever knows of it calls this

There is a notice when URL answers with 200, and with TEXT if `--says TEXT` is given; without one it
answers with 404, or with another text. Run it as root, for the programs of all users, or as a user
for your own. Each has until `--grace` is over: what is not saved by then runs on, as long as the
machine does. docs/operate/recipes.md has the URLs of clouds.

It needs Python's own library and `phos`. Exit code 0: all are saved; 1: the rest is named.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_ANSWER_SECONDS = 5.0
_CANCEL_SECONDS = 5.0
_MOST_BYTES = 1 << 16
_TOKEN_LASTS, _TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
# A metadata service is on the machine itself: no proxy of the environment knows it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Program = dict[str, Any]


def fetched(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return what a URL answers. Raises OSError, for 404 and the like HTTPError."""
    request = urllib.request.Request(url, headers=headers, method=method)
    with _opener.open(request, timeout=_ANSWER_SECONDS) as answer:
        text: bytes = answer.read(_MOST_BYTES)
    return text.decode(errors="replace")


def noticed(url: str, headers: dict[str, str], token_url: str, says: str) -> bool:
    """Return whether there is a notice. A URL that cannot be asked has none, which is told."""
    try:
        if token_url:
            headers = headers | {_TOKEN: fetched(token_url, {_TOKEN_LASTS: "60"}, "PUT")}
        return says in fetched(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            tell(f"{url} answers {error.code} {error.reason}; it is asked again")
    except OSError as error:
        tell(f"{url} cannot be asked ({error}); it is asked again")
    return False


def programs() -> list[Program]:
    """Return the programs, those with little memory first, so that as many as can be are saved."""
    done = subprocess.run(["phos", "ps", "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the programs cannot be listed: {done.stdout.strip()}")
    found = {row["pid"]: row for row in map(json.loads, done.stdout.splitlines())}
    roots = [row for pid, row in found.items() if not found.keys() & ancestors(pid)]
    return sorted(roots, key=lambda row: (row["state"] == "suspended", row["device_bytes"]))


def ancestors(pid: int) -> set[int]:
    """Return the processes above a process: a checkpoint of one has its children."""
    above: set[int] = set()
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended
            break
        pid = int(status.rpartition(")")[2].split()[1])
        above.add(pid)
    return above


def save_all(grace: float) -> int:
    """Save and end all programs; return the exit code."""
    until = time.monotonic() + grace
    # A program that comes to no safe point is saved where it is: it has no later chance.
    patience = f"--callback-deadline={max(grace / 4, 1):.0f}"
    options = ["--end", "--queue", "--without-callbacks", patience]
    begun: dict[int, subprocess.Popen[bytes]] = {}
    failed: list[int] = []
    for program in programs():
        pid = program["pid"]
        if program["state"] == "suspended":  # its GPUs are free when the others have ended
            failed += [each for each, save in begun.items() if not saved(each, save, until)]
            begun.clear()
            if not resumed(pid, until):
                failed.append(pid)
                continue
        begun[pid] = subprocess.Popen(
            ["phos", "checkpoint", str(pid), *options], stdout=subprocess.PIPE
        )
    failed += [each for each, save in begun.items() if not saved(each, save, until)]
    if failed:
        tell(f"not saved: {', '.join(map(str, failed))}")
    return 1 if failed else 0


def resumed(pid: int, until: float) -> bool:
    """Bring a suspended program back, to be saved: what is kept of it ends with the machine."""
    left = max(until - time.monotonic(), 0.0)
    try:
        done = subprocess.run(["phos", "resume", str(pid)], stdout=subprocess.DEVNULL, timeout=left)
    except subprocess.TimeoutExpired:
        tell(f"process {pid} is not resumed in time")
        return False
    return done.returncode == 0


def saved(pid: int, save: "subprocess.Popen[bytes]", until: float) -> bool:
    """Wait for a checkpoint; cancel it when the grace is over."""
    try:
        image, _ = save.communicate(timeout=max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        save.terminate()  # which cancels the job
        try:
            save.communicate(timeout=_CANCEL_SECONDS)
        except subprocess.TimeoutExpired:
            save.kill()
            save.communicate()
        tell(f"process {pid} is not saved in time, and runs on")
        return False
    if save.returncode == 0:
        tell(f"process {pid} is saved as {image.decode().strip()}")
    return save.returncode == 0


def tell(text: str) -> None:
    """Print a line at once, as it goes to a journal."""
    print(text, file=sys.stderr, flush=True)


def header(text: str) -> tuple[str, str]:
    """Parse ``NAME: VALUE``."""
    name, colon, value = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no header; write NAME: VALUE")
    return name.strip(), value.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    when = parser.add_mutually_exclusive_group(required=True)
    when.add_argument("--url", help="where there is a notice")
    when.add_argument("--now", action="store_true", help="do not wait for one")
    parser.add_argument("--header", action="append", type=header, default=[], metavar="NAME: VALUE")
    parser.add_argument("--token-url", default="", help="where AWS gives tokens (IMDSv2)")
    parser.add_argument("--says", default="", metavar="TEXT", help="what a notice has in it")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--grace", type=float, default=110.0, metavar="SECONDS")
    given = parser.parse_args()
    while not given.now and not noticed(given.url, dict(given.header), given.token_url, given.says):
        time.sleep(given.every)
    tell("the machine is about to be taken")
    return save_all(given.grace)


if __name__ == "__main__":
    sys.exit(main())

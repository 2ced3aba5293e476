"""A client for tests: calls a method over and over. As a program of its own, since it shares
nothing with the daemon but the bus.

``flood.py ADDRESS UID MEMBER PER_SECOND SECONDS`` prints one JSON object: how many calls it made,
how many were answered, or got which error (``NoReply``: no answer for 30 s), and the seconds that
each answer took, sorted.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter

from phosd.bus import ROOT, CallError, Connection

MANAGER = "org.phos.Manager1"
PATIENCE = 30.0


async def main(address: str, member: str, rate: float, seconds: float) -> None:
    connection = await Connection.open(address)
    outcomes: Counter[str] = Counter()
    took: list[float] = []

    async def one() -> None:
        began = time.monotonic()
        try:
            await connection.call(ROOT, MANAGER, member, patience=PATIENCE)
        except CallError as error:
            outcomes[error.name.rpartition(".")[2]] += 1
        else:
            outcomes["answered"] += 1
        took.append(time.monotonic() - began)

    begin = time.monotonic()
    calls: list[asyncio.Task[None]] = []
    while (now := time.monotonic() - begin) < seconds:
        due = int(now * rate) - len(calls)
        calls += [asyncio.create_task(one()) for _ in range(due)]
        await asyncio.sleep(0.002)
    # However late this program was, it makes all its calls.
    calls += [asyncio.create_task(one()) for _ in range(int(seconds * rate) - len(calls))]
    await asyncio.gather(*calls)
    connection.close()
    await connection.closed()
    print(json.dumps({"calls": len(calls), **outcomes, "took": sorted(took)}))


if __name__ == "__main__":
    _, address, uid, member, rate, seconds = sys.argv
    # Only now: another user may not read this interpreter's files.
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    asyncio.run(main(address, member, float(rate), float(seconds)))

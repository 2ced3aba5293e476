"""Start an inference server with a Llama of random weights, and ask it, each time for more.

    python asked.py vllm|transformers [--size 1b|8b] [--sleeps] [--port N] [-- OPTIONS]

The server is a child, and gets the OPTIONS. Each prompt is made of the answers before it, so
that each answer depends on all of them. ``--sleeps``: vLLM is put to sleep and woken between two
prompts, every third time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lines import print_lines

_NAME = "llama"
_TOKENS = 64
"""Tokens of an answer."""
_CONTEXT = 384
"""Tokens of a prompt, at most."""
_PATIENCE = 600.0
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # PyTorch's needs nothing that is compiled at the start
    "VLLM_SERVER_DEV_MODE": "1",  # which has /sleep and /wake_up
}


def _model(size: str) -> Path:
    """Return the folder of the model, made by a process of its own, which leaves the GPU."""
    folder = Path(tempfile.gettempdir(), f"phos-llama-{size}")
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        maker = Path(__file__).with_name("llama.py")
        subprocess.run([sys.executable, maker, size, unfinished], check=True)
        try:
            unfinished.rename(folder)
        except OSError:  # another one has made it meanwhile
            if not folder.exists():
                raise
    return folder


def _words(server: str, folder: Path, port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if server == "vllm":
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        return [*serve, *where, "--served-model-name", _NAME, "--max-model-len", "2048"]
    main = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-c", main, "serve", str(folder), *where]


class Server:
    """A server that answers on a port."""

    def __init__(self, words: Sequence[str], port: int) -> None:
        self._process = subprocess.Popen(words, env=os.environ | _OFFLINE)
        self._where = f"http://127.0.0.1:{port}"

    def wait_for(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"{self._where}/health", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def post(self, path: str, **content: Any) -> Any:
        """Ask it, by a connection of its own."""
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._where + path, json.dumps(content).encode(), kind)
        with urllib.request.urlopen(asked, timeout=_PATIENCE) as answer:
            return json.loads(answer.read() or "null")


def answers(server: Server, model: str, sleeps: bool) -> Iterator[float]:
    """Yield a checksum of each answer."""
    tokens = [*range(2, 2 + _TOKENS)]
    for number in range(1 << 30):
        prompt = " ".join(f"t{token}" for token in tokens)
        answer = server.post(
            "/v1/completions", model=model, prompt=prompt, max_tokens=_TOKENS, temperature=0.0
        )
        found = [int(token) for token in re.findall(r"t(\d+)", answer["choices"][0]["text"])]
        if len(found) != _TOKENS:
            raise ValueError(f"asked for {_TOKENS} tokens, and got {answer}")
        # Another beginning each time, so that no prompt is in the cache as a whole.
        tokens = [number % 1000 + 2, *tokens[1:], *found][-_CONTEXT:]
        if sleeps and number % 3 == 2:
            server.post("/sleep?level=1")
            server.post("/wake_up")
        yield float(sum(place * token for place, token in enumerate(found, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=("vllm", "transformers"))
    parser.add_argument("--size", choices=("1b", "8b"), default="1b")
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--port", type=int, default=8321)
    own, options = sys.argv[1:], list[str]()
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    arguments = parser.parse_args(own)
    folder = _model(arguments.size)
    words = [*_words(arguments.server, folder, arguments.port), *options]
    server = Server(words, arguments.port)
    server.wait_for()
    model = _NAME if arguments.server == "vllm" else str(folder)
    print_lines(answers(server, model, arguments.sleeps))


if __name__ == "__main__":
    main()

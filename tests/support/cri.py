"""Pods of containerd 2.1, asked for by the Container Runtime Interface, as the kubelet does.

containerd restores only what was made of an image that a registry has: there is one here, of images
made from what this machine has. Pods are in the network of the host, so that none is made for them.
"""

import hashlib
import io
import json
import os
import secrets
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from phosd.engine.criu.run.program import Criu
from phosd.engine.system.native import hook_library
from tests.support import containers, harness
from tests.support.containers import CHECKOUT
from tests.support.harness import wait_until

PREFIX = CHECKOUT / "build/containerd"
"""Where `make setup-containers` puts a containerd whose CRI saves containers, and its runc."""
LOG = "/log"
"""The program's log, in the file system of its container, which is saved with it."""
HOOK = "/opt/phos/libphos_hook.so"
"""In containers here, where /usr is the machine's and nothing can be mounted."""
_NAMESPACES = {"network": 2, "pid": 1}
"""The host's network, and the container's own pids: what the kubelet asks for, `hostNetwork`."""
_CGROUPS = Path("/sys/fs/cgroup")
_CONFIG = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/cri.sock"
[ttrpc]
address = "{folder}/ttrpc.sock"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"
use_local_image_pull = true
registry.config_path = "{folder}/registries"
pinned_images.sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
containerd.runtimes.runc.options.Root = "{folder}/runc"
"""


class Registry:
    """Serves images, each with one layer, on a port of this host."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[str, bytes]] = {}
        served = self._served

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, data = served.get(self.path, ("", b""))
                self.send_response(200 if kind else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.host = f"localhost:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, layer: bytes, annotations: Mapping[str, str] | None = None) -> str:
        """Serve an image; its reference."""
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
        media = "application/vnd.oci.image"
        blobs = {"config.v1+json": json.dumps(config).encode(), "layer.v1.tar": layer}
        for kind, blob in blobs.items():
            self._served[f"/v2/{name}/blobs/{_digest(blob)}"] = f"{media}.{kind}", blob
        described, layers = (
            {"mediaType": f"{media}.{kind}", "digest": _digest(blob), "size": len(blob)}
            for kind, blob in blobs.items()
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{media}.manifest.v1+json",
            "config": described,
            "layers": [layers],
            "annotations": {**(annotations or {})},
        }
        text = json.dumps(manifest).encode()
        for reference in ("test", _digest(text)):
            served = f"{media}.manifest.v1+json", text
            self._served[f"/v2/{name}/manifests/{reference}"] = served
        return f"{self.host}/{name}:test"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _tar(path: Path, name: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(path, arcname=name)
    return data.getvalue()


@dataclass(frozen=True)
class Cri:
    """The CRI of a containerd in ``place``; ``folders`` is an image of empty folders."""

    place: Path
    daemon: "subprocess.Popen[str]"
    registry: Registry
    messages: Any
    channel: Any
    folders: str = field(default="", kw_only=True)

    def call(self, method: str, service: str = "Runtime", **given: Any) -> Any:
        """Call a method with the fields of its request; the response."""
        return self.begin(method, service, **given).result(60)

    def begin(self, method: str, service: str = "Runtime", **given: Any) -> Any:
        """Begin such a call, of which the kubelet cancels those that take too long."""
        request = getattr(self.messages, f"{method}Request")
        response = getattr(self.messages, f"{method}Response", self.messages.Empty)
        call = self.channel.unary_unary(
            f"/runtime.v1.{service}Service/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return call.future(request(**given))

    def pull(self, name: str, layer: bytes, annotations: Mapping[str, str] | None = None) -> str:
        """Let containerd take an image from the registry, which gets it first; its reference."""
        reference = self.registry.add(name, layer, annotations)
        self.call("PullImage", "Image", image={"image": reference})
        return reference

    @property
    def ctr(self) -> list[str]:
        """The command for what the CRI has no call for."""
        address = self.place / "containerd/cri.sock"
        return [str(PREFIX / "bin/ctr"), f"--address={address}", "--namespace=k8s.io"]

    @property
    def tasks(self) -> Path:
        """Where containerd keeps what it starts for pods."""
        return self.place / "containerd/state/io.containerd.runtime.v2.task/k8s.io"

    @contextmanager
    def pod(self, name: str) -> Iterator["Pod"]:
        """Run a pod, without containers at first. It ends with what runs in it."""
        uid = str(uuid.uuid4())
        config = {
            "metadata": {"name": name, "uid": uid, "namespace": "team"},
            "log_directory": str(self.place / "logs"),
            "linux": {
                "cgroup_parent": f"/kubepods/pod{uid}",
                "security_context": {"namespace_options": _NAMESPACES},
            },
        }
        made = self.call("RunPodSandbox", config=config)
        pod = Pod(self, made.pod_sandbox_id, config)
        try:
            yield pod
        finally:
            for container in pod.containers:
                container.resume()  # what is frozen does not end
            self.call("RemovePodSandbox", pod_sandbox_id=made.pod_sandbox_id)
            for pattern in (f"kubepods/pod{uid}", f"*/kubepods/pod{uid}"):
                for cgroup in _CGROUPS.glob(pattern):  # as the kubelet does
                    cgroup.rmdir()


@dataclass(frozen=True)
class Pod:
    """A pod that runs."""

    cri: Cri
    id: str
    config: dict[str, Any]
    containers: "list[Container]" = field(default_factory=list)

    def container(self, image: str, **settings: Any) -> "Container":
        """Make a container of an image, which may be one of a checkpoint, and start it."""
        config = {"metadata": {"name": "main"}, "image": {"image": image}, "log_path": "main.log"}
        made = self.cri.call(
            "CreateContainer",
            pod_sandbox_id=self.id,
            config=config | settings,
            sandbox_config=self.config,
        )
        container = Container(self.cri, made.container_id)
        self.containers.append(container)
        self.cri.call("StartContainer", container_id=container.id)
        return container


@dataclass(frozen=True)
class Container:
    """A container that was started."""

    cri: Cri
    id: str

    @property
    def pid(self) -> int:
        """The pid that the program has outside."""
        said = self.cri.call("ContainerStatus", container_id=self.id, verbose=True)
        return int(json.loads(said.info["info"])["pid"])

    def checkpoint(self, archive: Path) -> None:
        """Save it into an archive; it runs on."""
        self.begin_checkpoint(archive).result(60)

    def begin_checkpoint(self, archive: Path) -> Any:
        where = {"container_id": self.id, "location": str(archive)}
        return self.cri.begin("CheckpointContainer", **where)

    def resume(self) -> None:
        """Resume it, if it is paused."""
        command = [*self.cri.ctr, "tasks", "resume", self.id]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        other = ("cannot resume", "not paused", "not found")
        assert done.returncode == 0 or any(text in done.stderr for text in other), done.stderr


@contextmanager
def containerd(place: Path, criu: str) -> Iterator[Cri]:
    """Run containerd, with its mounts in a namespace of its own: what it leaves is gone with it.
    ``criu`` is what the settings of runc's CRIU say.
    """
    import grpc  # `make setup-containers` installs it

    for name in ("containerd", "logs", "criu"):
        (place / name).mkdir()
    folder, settings = place / "containerd", place / "criu"
    (settings / "runc.conf").write_text(criu)
    registry = Registry()
    try:
        source = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
        build = ["cc", "-static", "-x", "c", "-", "-o", str(place / "pause")]
        subprocess.run(build, input=source.encode(), check=True)
        pause = registry.add("pause", _tar(place / "pause", "pause"))
        (folder / "config.toml").write_text(_CONFIG.format(folder=folder, pause=pause))
        (hosts := folder / "registries" / registry.host).mkdir(parents=True)
        (hosts / "hosts.toml").write_text(f'server = "http://{registry.host}"\n')
        # Where the machine may have CRIU settings, containerd and its runc see these.
        script = 'mkdir -p /etc/criu; mount --bind "$0" /etc/criu; exec "$@"'
        words = ["unshare", "--mount", "sh", "-ec", script, str(settings)]
        path = f"{PREFIX / 'bin'}:{Criu.find().path.parent}:{os.environ['PATH']}"
        with (
            (folder / "log").open("wb") as log,
            harness.running(
                [*words, "containerd", f"--config={folder / 'config.toml'}"],
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": path, "PHOS_RUNTIME_DIR": str(place / "run")},
            ) as daemon,
        ):
            wait_until((folder / "cri.sock").exists, "containerd")
            with grpc.insecure_channel(f"unix:{folder / 'cri.sock'}") as channel:
                messages = grpc.protos("tests/support/cri.proto")
                cri = Cri(place, daemon, registry, messages, channel)
                cri.pull("folders", _tar(containers.rootfs(place), "."))
                try:
                    yield cri
                finally:
                    daemon.terminate()
                    daemon.wait()
    finally:
        registry.close()


def settings(program: str, place: Path) -> dict[str, Any]:
    """What the container of a target program has of this machine; the hook is not among it."""
    env = containers.environment(place)
    del env["LD_PRELOAD"]
    return {
        "command": containers.command(program, place, LOG),
        "envs": [{"key": name, "value": value.encode()} for name, value in env.items()],
        "mounts": [
            {"container_path": path, "host_path": path, "readonly": access == "ro"}
            for path, access in containers.bound_paths(place)
            if path != "/etc"  # where the CRI mounts files of its own
        ],
        "linux": {"security_context": {"namespace_options": _NAMESPACES}},
    }


def with_volumes(settings: dict[str, Any], cri: Cri) -> dict[str, Any]:
    """Add the hook as a pod has it: a `hostPath`, an `emptyDir` in memory, and the variable."""
    memory = cri.place / f"volume-{secrets.token_hex(4)}"
    memory.mkdir()
    into = ["nsenter", f"--mount=/proc/{cri.daemon.pid}/ns/mnt"]
    mount = [*into, "mount", "-t", "tmpfs", "-o", "mode=0777,size=1m", "tmpfs", str(memory)]
    subprocess.run(mount, check=True)
    volumes = {HOOK: (hook_library().resolve(), True), "/run/phos/hook": (memory, False)}
    mounts = [
        {"container_path": path, "host_path": str(source), "readonly": read_only}
        for path, (source, read_only) in volumes.items()
    ]
    preload = {"key": "LD_PRELOAD", "value": HOOK.encode()}
    return settings | {
        "mounts": [*settings["mounts"], *mounts],
        "envs": [*settings["envs"], preload],
    }

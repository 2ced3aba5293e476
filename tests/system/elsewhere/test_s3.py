"""Push to and pull from S3: moto's server, which `make test-all` installs."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from phosd.client.remote import Remote
from phosd.errors import InvalidOption, NotAuthorized, PhosError
from tests.support.remote import Image, pulled, pushed
from tests.support.rotation import EVERYTHING

pytestmark = pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs an S3 server")

BUCKET = "images"
PARTS = [os.urandom(1 << 20) for _ in range(3)]
FIRST, SECOND = "20260101T000000-0001", "20260102T000000-0002"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def s3(endpoint: str, credentials: None, monkeypatch: pytest.MonkeyPatch) -> str:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    if not files.exists(BUCKET):
        files.mkdir(BUCKET)
    return f"s3://{BUCKET}"


def test_only_new_chunks_go_to_a_bucket(s3: str) -> None:
    for url in (s3, f"{s3}/below/this"):
        remote = Remote(url)
        assert pushed(remote, Image(FIRST, PARTS)).sent_chunks == 3
        assert pushed(remote, Image(SECOND, [*PARTS, b"more"])).sent_chunks == 1
        assert remote.images() == [FIRST, SECOND]
        assert pulled(remote, FIRST) == PARTS
        assert pulled(remote) == [*PARTS, b"more"]


def test_a_bucket_that_is_not_there_is_not_made(s3: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidOption, match="is not there"):
            pushed(Remote("s3://a-slip/below"), Image(FIRST, PARTS))
        with pytest.raises(PhosError):
            pulled(Remote("s3://a-slip/below"))


class _Refuses(BaseHTTPRequestHandler):
    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        text = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_PUT = do_HEAD = do_POST = _refuse  # noqa: N815 - the library's names

    def log_message(self, *_: object) -> None:
        pass


def test_a_bucket_that_refuses_is_named(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    with HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            s3fs.S3FileSystem.clear_instance_cache()
            with pytest.raises(NotAuthorized, match="s3://images cannot be read"):
                pushed(Remote(f"s3://{BUCKET}"), Image(FIRST, PARTS))
        finally:
            server.shutdown()
            thread.join()

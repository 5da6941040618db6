"""What a store answers when it refuses, as one line that says why."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator

import pytest

from penstock.disk.objectstore import ObjectOptions, Obstore, check_conditions, make_store, publish
from penstock.errors import OptionsError, PenstockError, RetryError

KEY = "AKIAHIDDEN"


def answer_of(code: str, message: str) -> bytes:
    """Return the body of an error as stores write it."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>'
    return f"{text}<AWSAccessKeyId>{KEY}</AWSAccessKeyId><RequestId>1</RequestId></Error>".encode()


class Server(http.server.ThreadingHTTPServer):
    """A store that refuses everything, or only what is put."""

    status, body, reads = 403, b"", False


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        absent = self.server.reads and self.command in ("GET", "HEAD")
        body = answer_of("NoSuchKey", "The specified key does not exist.") if absent else self.server.body
        self.send_response(404 if absent else self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _refuse  # noqa: N815 - the names of the library

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def store_at(server: Server) -> Obstore:
    config = {
        "aws_endpoint_url_s3": f"http://127.0.0.1:{server.server_port}",
        "aws_access_key_id": KEY,
        "aws_secret_access_key": "hidden",
        "aws_region": "us-east-1",
    }
    return make_store("s3://bucket", ObjectOptions(config=config, retry_seconds=0.01))


REFUSALS = {
    "AccessDenied": (403, "Access Denied", OptionsError),
    "SignatureDoesNotMatch": (403, "The request signature we calculated does not match.", OptionsError),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is large.", RetryError),
    "SlowDown": (503, "Please reduce your request rate.", RetryError),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_is_told_in_one_line_by_its_code(code: str, server: Server) -> None:
    server.status, message, kind = REFUSALS[code]
    server.body = answer_of(code, message)
    store = store_at(server)
    asks = (
        lambda: store.get("a"),
        lambda: store.put("a", b"1"),
        lambda: store.create("a", b"1"),
        lambda: list(store.objects()),
        lambda: publish(store, "a", b"1", None),
    )
    for ask in asks:
        with pytest.raises(kind) as raised:
            ask()
        text = str(raised.value)
        assert f"{code}: {message}" in text
        assert not any(part in text for part in ("\n", "<", KEY))


def test_who_may_read_and_not_put_is_told_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.body, server.reads = answer_of("AccessDenied", "Access Denied"), True
    with caplog.at_level(logging.DEBUG), pytest.raises(PenstockError, match="AccessDenied"):
        check_conditions(store_at(server), "probe")
    assert caplog.messages == []  # nothing was written, so nothing stays

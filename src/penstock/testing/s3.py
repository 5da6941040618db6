"""A real S3 server for tests and benchmarks: moto's, in a process of its own, on a free loopback port.

moto looks and then writes, so two conditional puts could both win; here the four calls that write hold a lock.
"""

from __future__ import annotations

import functools
import http.client
import os
import subprocess
import sys
import threading
import time
from typing import Any, Self

__all__ = ["S3Server"]

READY_SECONDS = 120.0


class S3Server:
    """One server process with one bucket; its objects are in memory and end with it.

    ``environment`` is what a process needs to reach it; ``options`` the same for code.

    >>> S3Server.environment_for(9000)["AWS_ENDPOINT_URL"]
    'http://127.0.0.1:9000'
    """

    def __init__(self, bucket: str = "penstock") -> None:
        self.bucket = bucket
        command = [sys.executable, "-m", "penstock.testing.s3"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()  # it says its port when it listens
        if not line.isdigit():
            self.stop()
            raise RuntimeError("the S3 server did not start: pip install 'moto[s3]' flask flask-cors (dev group)")
        self.port = int(line)
        self.make_bucket(bucket)

    @staticmethod
    def environment_for(port: int) -> dict[str, str]:
        """Return the variables with which a process finds a server on this port."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process finds this server."""
        return self.environment_for(self.port)

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return the same as ``ObjectOptions.config``, for this server or a proxy before it."""
        return {
            "aws_endpoint_url_s3": f"http://127.0.0.1:{port or self.port}",
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket, which the store's library cannot."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                connection.request("PUT", f"/{name}")
                connection.getresponse().read()
                connection.close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _serve() -> None:
    import logging

    from moto.s3 import responses
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    lock = threading.RLock()

    def locked(call: Any) -> Any:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return call(*args, **kwargs)

        return run

    for name in ("put_object", "copy_object", "delete_object", "_key_response_post"):
        setattr(responses.S3Response, name, locked(getattr(responses.S3Response, name)))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    parent = os.getppid()
    print(server.get_host_and_port()[1], flush=True)  # noqa: T201 - this is how it says where it listens
    while os.getppid() == parent:  # it ends with whoever started it
        time.sleep(0.5)


if __name__ == "__main__":
    _serve()

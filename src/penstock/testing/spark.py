"""Real Spark servers for tests, from the pip package, on free loopback ports: a standalone cluster, Spark Connect."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from typing import Final, Self

from penstock.spark.session import LOG4J, launch_environment
from penstock.testing.nats import _free_port

__all__ = ["SparkCluster", "ConnectServer"]

READY_SECONDS: Final = 120.0
FAST: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class _Servers:
    """Processes started with Spark's own start script, each in a group of its own, ended by that group's number."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self._log4j = os.path.join(folder, "log4j2.properties")
        with open(self._log4j, "w", encoding="utf-8") as file:
            file.write(LOG4J)
        self._temporary = os.path.join(folder, "tmp")
        os.makedirs(self._temporary, exist_ok=True)
        self._environment = {**os.environ, **launch_environment(folder), "SPARK_LOCAL_DIRS": self._temporary}
        self._processes: list[subprocess.Popen[bytes]] = []

    def _launch(self, script: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        log = os.path.join(self.folder, f"server-{len(self._processes)}.log")
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [os.path.join(self._environment["SPARK_HOME"], "bin", script), *words],
                env={**self._environment, **environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _java_options(self) -> str:
        return f"{FAST} -Dlog4j2.configurationFile=file:{self._log4j} -Djava.io.tmpdir={self._temporary}"

    def _wait_for(self, port: int, what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._processes[-1].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{what} did not come up on port {port}:\n{self.last_words()}")

    def last_words(self) -> str:
        """Return the end of what each process printed."""
        words = []
        for name in sorted(os.listdir(self.folder)):
            if name.startswith("server-"):
                with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as file:
                    words.append(f"{name}: {file.read()[-2000:]}")
        return "\n".join(words)

    def stop(self) -> None:
        """End all of them at once, as a crash would."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class SparkCluster(_Servers):
    """A standalone master with workers of one core each.

    >>> with SparkCluster(folder, workers=2) as cluster:  # doctest: +SKIP
    ...     spark = session(master=cluster.url)
    """

    def __init__(self, folder: str, *, workers: int = 2, memory: str = "1g") -> None:
        super().__init__(folder)
        self.port = _free_port()
        self._options = {"SPARK_DAEMON_JAVA_OPTS": self._java_options(), "SPARK_DAEMON_MEMORY": "512m"}
        self._serve("master.Master", self.port)
        for number in range(workers):
            work = os.path.join(folder, f"work-{number}")
            more = ("--cores", "1", "--memory", memory, "--work-dir", work, self.url)
            self._serve("worker.Worker", _free_port(), *more)

    def _serve(self, name: str, port: int, *more: str) -> None:
        place = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(_free_port()))
        self._launch("spark-class", f"org.apache.spark.deploy.{name}", *place, *more, **self._options)
        self._wait_for(port, name)

    @property
    def url(self) -> str:
        """The address of the master."""
        return f"spark://127.0.0.1:{self.port}"


class ConnectServer(_Servers):
    """A Spark Connect server with a local Spark behind it.

    >>> with ConnectServer(folder) as server:  # doctest: +SKIP
    ...     spark = session(master=server.url)
    """

    def __init__(self, folder: str, *, master: str = "local[2]") -> None:
        super().__init__(folder)
        self.port = _free_port()
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": self.port,
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.sql.warehouse.dir": os.path.join(folder, "warehouse"),
            "spark.sql.shuffle.partitions": 2,
            "spark.driver.extraJavaOptions": self._java_options(),
        }
        words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        service = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal")
        self._launch("spark-submit", "--master", master, *words, *service)
        self._wait_for(self.port, "the Connect server")

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"sc://127.0.0.1:{self.port}"

"""Promise: the client for programs without a loop is one of many threads, ends with a fork, and never hangs."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from client_use import serving
from wire_use import SECONDS, options

from penstock.channels.wire import BlockingClient, ChannelServer, Heard
from penstock.errors import ClosedError

MESSAGES = 400


async def test_threads_that_share_a_client_hear_each_message_once(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as server:
        address = "plain://" + server.addresses["channels-plain"]

        def work() -> None:
            found: list[int] = []
            faults: list[BaseException] = []
            with BlockingClient(address, username="ann") as ann, BlockingClient(address, username="bob") as bob:
                ann.join("c")
                bob.join("c")

                def take() -> None:
                    try:
                        for message in bob.messages():
                            found.append(message.seq)
                            if message.payload == b"last":
                                bob.close()
                    except BaseException as exc:
                        faults.append(exc)

                threads = [threading.Thread(target=take) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for _ in range(MESSAGES):
                    ann.broadcast("c", b"x")
                ann.broadcast("c", b"last")
                for thread in threads:
                    thread.join(SECONDS)
            assert faults == []
            assert sorted(found) == list(range(1, MESSAGES + 2))

        await asyncio.to_thread(work)


def _ask(client: BlockingClient, begun: threading.Semaphore, ended: list[BaseException]) -> None:
    try:
        while True:
            client.channels()
            begun.release()
    except BaseException as exc:
        ended.append(exc)


async def test_a_thread_that_asks_while_another_closes_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as server:
        address = "plain://" + server.addresses["channels-plain"]

        def work() -> None:
            for _ in range(20):
                client = BlockingClient(address, username="ann")
                begun, ended = threading.Semaphore(0), list[BaseException]()
                threads = [threading.Thread(target=_ask, args=(client, begun, ended), daemon=True) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for _ in range(10):
                    begun.acquire(timeout=SECONDS)
                client.close()
                for thread in threads:
                    thread.join(SECONDS)
                assert len(ended) == 3
                assert all(isinstance(exc, Exception) for exc in ended), ended
                assert {type(exc).__module__ for exc in ended} == {"penstock.errors"}, ended

        await asyncio.to_thread(work)


def _said_in_a_child(client: BlockingClient) -> list[str]:
    said = []
    with client:
        for ask in (lambda: client.members("c"), lambda: client.next_news(1.0), lambda: next(client.news())):
            try:
                said.append(repr(ask()))
            except ClosedError as exc:
                said.append(str(exc))
    return [*said, "closed"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_a_client_ends_with_a_fork_and_says_so(tmp_path: Path) -> None:
    """Its thread is not there in a child, which waited for it for ever."""
    async with serving(tmp_path, auth=False) as server:
        address = "plain://" + server.addresses["channels-plain"]

        def work() -> None:
            with BlockingClient(address, username="ann") as ann:
                ann.join("c")
                while ann.next_news(0.01) is not None:  # the last of them goes on waiting
                    pass
                reads, writes = os.pipe()
                child = os.fork()
                if not child:
                    try:
                        signal.alarm(round(SECONDS))
                        os.write(writes, "|".join(_said_in_a_child(ann)).encode())
                    finally:
                        os._exit(0)
                os.close(writes)
                with open(reads) as told:
                    why = "the client was opened before a fork: open another one in the child"
                    assert told.read().split("|") == [why, why, why, "closed"]
                os.waitpid(child, 0)
                assert ann.members("c") == ["ann@localhost"]  # the parent's goes on
                with pytest.raises(TypeError, match="cannot be pickled"):
                    pickle.dumps(ann)

        await asyncio.to_thread(work)


def test_a_request_that_is_interrupted_is_given_up(tmp_path: Path) -> None:
    """It went on, and its answer was waited for behind the back of whoever had been interrupted."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        if not interrupted and frame is not None and frame.f_code.co_filename.endswith("threading.py"):
            interrupted.append(True)
            raise KeyboardInterrupt

    class Looks:
        async def on_event(self, _: Any) -> None:
            while not interrupted:  # it does not wait yet
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.sleep(0.001)
            try:
                await may.wait()
            finally:
                looked.append(True)

    async def serve() -> None:
        async with ChannelServer(tmp_path, options(), modulator=Looks()) as server:
            begun.set_result((asyncio.get_running_loop(), "plain://" + server.addresses["channels-plain"]))
            await may.wait()

    may, interrupted, looked = asyncio.Event(), list[bool](), list[bool]()
    begun: Future[tuple[asyncio.AbstractEventLoop, str]] = Future()
    serving = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    former = signal.signal(signal.SIGUSR1, interrupt)
    serving.start()
    loop, address = begun.result(SECONDS)
    try:
        with BlockingClient(address, username="ann") as ann:
            with pytest.raises(KeyboardInterrupt):
                ann.join("c")
            while "Client.join" in repr(asyncio.all_tasks(ann._loop)):
                time.sleep(0.001)
            assert not looked, "it was answered"
    finally:
        signal.signal(signal.SIGUSR1, former)
        loop.call_soon_threadsafe(may.set)
        serving.join(SECONDS)


async def test_news_that_a_caller_did_not_wait_for_is_news_of_the_next(tmp_path: Path) -> None:
    async with serving(tmp_path, auth=False) as server:
        address = "plain://" + server.addresses["channels-plain"]

        def work() -> None:
            with BlockingClient(address, username="ann") as ann, BlockingClient(address, username="bob") as bob:
                ann.join("c")
                bob.join("c")
                assert bob.next_news(0) is None
                assert bob.next_news(-1.0) is None
                ann.broadcast_many("c", [b"1", b"2", b"3"])
                for message in bob.messages():
                    assert message.payload == b"1"
                    break
                rest = [bob.next_news(SECONDS), bob.next_news(SECONDS)]
                assert [item.payload for item in rest if isinstance(item, Heard)] == [b"2", b"3"]

        await asyncio.to_thread(work)

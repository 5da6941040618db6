"""Promise: a modulator is a small Python class; one that fails, hangs or lies is an answer, and nothing else."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from wire_use import PlainAuthenticator, Raw, address, moderated, options

from penstock.channels.wire import Challenge, ChannelServer, Client
from penstock.channels.wire.counts import LATE
from penstock.channels.wire.modulator import load_modulator
from penstock.errors import OptionsError, Refused

C = "channel=!c@localhost"


async def test_who_may_join_and_broadcast_is_the_modulators_word(tmp_path: Path) -> None:
    class Door:
        def authorize_join(self, nid: Any, channel: Any) -> bool:
            return nid.username != "eve"

        async def authorize_broadcast(self, nid: Any, channel: Any) -> bool:
            return nid.username == "ann"

    server = await moderated(tmp_path, Door())
    try:
        async with (
            await Client.connect(address(server), username="ann") as ann,
            await Client.connect(address(server), username="bob") as bob,
            await Client.connect(address(server), username="eve") as eve,
        ):
            await ann.join("c")
            await bob.join("c")
            with pytest.raises(Refused, match="NOT_ALLOWED"):
                await eve.join("c")
            with pytest.raises(Refused, match="NOT_ALLOWED"):
                await bob.broadcast("c", b"x")
            assert await ann.broadcast_many("c", [b"x", b"y"]) == [1, 2]
    finally:
        await server.stop()


async def hang(*_: Any) -> Any:
    await asyncio.Event().wait()


def fail(*_: Any) -> Any:
    raise RuntimeError("boom")


def lie(*_: Any) -> Any:
    return 7


def fail_blocking(*_: Any) -> Any:
    GO_ON.wait(60)


GO_ON = threading.Event()


@pytest.mark.parametrize("method", [hang, fail, lie, fail_blocking])
@pytest.mark.parametrize("asked", ["authenticate", "transform", "direct"])
async def test_a_modulator_that_fails_hangs_or_lies_is_an_answer(method: Any, asked: str, tmp_path: Path) -> None:
    GO_ON.clear()
    modulator = type("Bad", (), {asked: staticmethod(method)})()
    server = await moderated(tmp_path, modulator, modulator_timeout=0.2)
    try:
        async with await Raw.open(server) as raw:
            if asked == "authenticate":
                await raw.ask("CONNECT version=1")
                answer = await raw.ask("AUTH token=x")
            else:
                await raw.login("ann")
                await raw.ask(f"JOIN id=1 {C}")
                sent = f"BROADCAST id=2 {C}" if asked == "transform" else "MOD_DIRECT id=2 from=x"
                answer = await raw.ask(f"{sent} length=1\nx\n")
            if (asked, method) == ("direct", lie):
                assert answer == "MOD_DIRECT_ACK id=2"  # 7 is as good a yes as any
            else:
                assert "reason=INTERNAL_SERVER_ERROR" in answer
                assert await raw.ended()
        assert server.health().state.serves
    finally:
        GO_ON.set()
        await server.stop()


async def test_a_modulator_is_replaced_while_clients_are_connected(tmp_path: Path) -> None:
    class Shout:
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            return payload.upper()

    class Whisper:
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            return payload.lower()

    server = await moderated(tmp_path, Shout())
    try:
        async with (
            await Client.connect(address(server), username="ann") as ann,
            await Client.connect(address(server), username="bob") as bob,
        ):
            await ann.join("c")
            await bob.join("c")
            heard = bob.messages()
            await ann.broadcast("c", b"Hi")
            server.set_modulator(Whisper())
            await ann.broadcast("c", b"Hi")
            assert [(await anext(heard)).payload for _ in range(2)] == [b"HI", b"hi"]
            with pytest.raises(OptionsError, match="authenticates"):
                server.set_modulator(PlainAuthenticator())
    finally:
        await server.stop()


async def test_who_is_connected_asks_what_the_new_modulator_offers(tmp_path: Path) -> None:
    """A private payload that the new one does not take was never answered; one that only it takes was refused."""

    class Takes:
        def direct(self, nid: Any, payload: bytes) -> bool:
            return True

    class Looks:
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            return payload

    server = await moderated(tmp_path, Takes())
    try:
        async with await Raw.open(server) as ann, await Raw.open(server) as bob:
            await ann.login("ann")
            assert await ann.ask("MOD_DIRECT id=1 from=x length=1\nx\n") == "MOD_DIRECT_ACK id=1"
            server.set_modulator(Looks())
            await bob.login("bob")
            assert await ann.ask("MOD_DIRECT id=2 from=x length=1\nx\n") == "ERROR reason=UNEXPECTED_MESSAGE"
            server.set_modulator(Takes())
            assert await bob.ask("MOD_DIRECT id=3 from=x length=1\nx\n") == "MOD_DIRECT_ACK id=3"
    finally:
        await server.stop()


async def test_what_an_old_modulator_was_asked_it_answers(tmp_path: Path) -> None:
    class Slow:
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            asked.release()
            GO_ON.wait(60)
            return payload.upper()

    class Quick:
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            return payload

    GO_ON.clear()
    asked = threading.Semaphore(0)
    server = await moderated(tmp_path, Slow())
    people = [await (await Raw.open(server)).login(f"p{n}") for n in range(12)]  # more than it has threads
    try:
        for n, raw in enumerate(people):
            await raw.ask(f"JOIN id=1 channel=!c{n}@localhost")
            for number in (2, 3):
                raw.write(f"BROADCAST id={number} channel=!c{n}@localhost length=1\nx\n")
                await raw.ask(f"CHANNELS id={number + 10}")  # they are two runs
        for _ in range(8):
            assert await asyncio.to_thread(asked.acquire, timeout=60)
        server.set_modulator(Quick())
        GO_ON.set()
        for raw in people:
            assert await raw.frames(2) == ["BROADCAST_ACK id=2 seq=1", "BROADCAST_ACK id=3 seq=2"]
    finally:
        GO_ON.set()
        for raw in people:
            await raw.gone()
        await server.stop()


async def test_a_request_that_takes_longer_than_its_time_is_logged_and_answered_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the original: ``request_timeout`` only tells; a late answer still comes."""
    gate = asyncio.Event()

    class Slow:
        async def authorize_join(self, nid: Any, channel: Any) -> bool:
            await gate.wait()
            return True

    before = LATE.value()
    server = await moderated(tmp_path, Slow(), wire={"request_timeout": 0.05})
    try:
        async with asyncio.timeout(60), await Client.connect(address(server), username="ann") as ann:
            joining = asyncio.create_task(ann.join("c"))
            while LATE.value() == before:
                await asyncio.sleep(0.01)
            gate.set()
            await joining
            assert await ann.members("c") == ["ann@localhost"]
    finally:
        await server.stop()
    assert LATE.value() == before + 1
    assert "ann@localhost: 1 requests take longer than 0.05 s" in caplog.text


def leave(*_: Any) -> Any:
    sys.exit(3)


async def leave_later(*_: Any) -> Any:
    sys.exit(3)


async def cancel(*_: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize("method", [leave, leave_later, cancel])
@pytest.mark.parametrize("asked", ["authenticate", "transform", "authorize_join", "on_event"])
async def test_a_modulator_that_wants_to_end_the_process_is_an_answer(method: Any, asked: str, tmp_path: Path) -> None:
    server = await moderated(tmp_path, type("Bad", (), {asked: staticmethod(method)})())
    try:
        async with await Raw.open(server) as raw:
            if asked == "authenticate":
                await raw.ask("CONNECT version=1")
                assert "reason=INTERNAL_SERVER_ERROR" in await raw.ask("AUTH token=x")
                return
            await raw.login("ann")
            joined = await raw.ask(f"JOIN id=1 {C}")
            if asked == "authorize_join":
                assert joined == "ERROR id=1 reason=INTERNAL_SERVER_ERROR"
                return
            assert joined == f"JOIN_ACK id=1 {C}"
            if asked == "transform":
                assert await raw.ask(f"BROADCAST id=2 {C} length=1\nx\n") == "ERROR id=2 reason=INTERNAL_SERVER_ERROR"
        assert server.health().state.serves
    finally:
        await server.stop()


@pytest.mark.parametrize("text", ["", "two\nlines", "all \" ' : * of them", "ends in \\ a\\"])
async def test_a_challenge_that_no_client_can_read_is_a_lie(text: str, tmp_path: Path) -> None:
    class Riddles:
        def authenticate(self, token: str) -> Challenge:
            return Challenge(text)

    server = await moderated(tmp_path, Riddles())
    try:
        async with await Raw.open(server) as raw:
            await raw.ask("CONNECT version=1")
            assert "reason=INTERNAL_SERVER_ERROR" in await raw.ask("AUTH token=x")
            assert await raw.ended()
    finally:
        await server.stop()


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("bad", [b"fail", b"none"])
async def test_what_was_good_before_a_bad_payload_is_kept_and_answered(bad: bytes, later: bool, tmp_path: Path) -> None:
    """A run of pipelined broadcasts: each is judged by itself, and the error names the one it is about."""

    def judge(nid: Any, channel: Any, payload: bytes) -> bytes | None:
        if payload == b"fail":
            raise ValueError(payload)
        return None if payload == b"none" else payload.upper()

    async def judge_later(nid: Any, channel: Any, payload: bytes) -> bytes | None:
        return judge(nid, channel, payload)

    class Judge(PlainAuthenticator):
        transform = staticmethod(judge_later if later else judge)

    server = await moderated(tmp_path, Judge())
    try:
        async with await Raw.open(server) as ann, await Raw.open(server) as bob:
            for raw, name in ((ann, "ann"), (bob, "bob")):
                await raw.login(name, auth=True)
                await raw.ask(f"JOIN id=1 {C}")
            await ann.frame()
            await ann.ask(f"SET_CHAN_CONFIG id=2 {C} persist=true")
            await bob.frame()
            said = [b"one!", b"two!", bad, b"four"]
            ann.write(
                b"".join(b"BROADCAST id=%d %s length=4\n%s\n" % (n, C.encode(), p) for n, p in enumerate(said, 3))
            )
            reason = "INTERNAL_SERVER_ERROR" if bad == b"fail" else "BAD_REQUEST"
            acked = ["BROADCAST_ACK id=3 seq=1", "BROADCAST_ACK id=4 seq=2", f"ERROR id=5 reason={reason}"]
            assert await ann.frames(3) == acked
            assert await ann.ended()
            assert [frame.split("\n")[1] for frame in await bob.frames(2)] == ["ONE!", "TWO!"]
    finally:
        await server.stop()


async def test_requests_that_ask_a_modulator_and_the_disk_are_counted_once(tmp_path: Path) -> None:
    class Same(PlainAuthenticator):
        def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            return payload

    server = await moderated(tmp_path, Same())
    try:
        async with await Raw.open(server) as ann:
            await ann.login("ann", auth=True)
            await ann.ask(f"JOIN id=1 {C}")
            await ann.ask(f"SET_CHAN_CONFIG id=2 {C} persist=true")
            ann.write("".join(f"BROADCAST id={n} {C} length=1\nx\n" for n in range(3, 103)))
            assert [frame.split()[0] for frame in await ann.frames(100)] == ["BROADCAST_ACK"] * 100
    finally:
        await server.stop()


async def test_a_method_that_returns_something_to_wait_for_is_waited_for(tmp_path: Path) -> None:
    async def name(token: str) -> str:
        return token

    class Wrapped:
        def authenticate(self, token: str) -> Any:
            return name(token)

    server = await moderated(tmp_path, Wrapped())
    try:
        async with await Client.connect(address(server), token="ann") as ann:
            assert ann.nid == "ann@localhost"
    finally:
        await server.stop()


async def test_after_a_fatal_error_a_client_is_out_before_it_sees_the_end(tmp_path: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        async def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            asked.set()
            await go_on.wait()
            return payload

    server = await moderated(tmp_path, Slow())
    try:
        async with await Raw.open(server) as ann:
            await ann.login("ann")
            assert await ann.ask(f"JOIN id=1 {C}") == f"JOIN_ACK id=1 {C}"
            ann.write(f"BROADCAST id=2 {C} length=1\nx\n")
            await asked.wait()
            assert await ann.ask("NOPE") == 'ERROR detail=\\"unknown message\\" reason=BAD_REQUEST'
            asyncio.get_running_loop().call_later(0.2, go_on.set)
            assert await ann.ended()
            assert go_on.is_set()
            async with await Raw.open(server) as again:
                await again.login("ann")  # the name is free
                assert await again.ask("CHANNELS id=1") == "CHANNELS_ACK id=1"
    finally:
        await server.stop()


class Shout(bytes):
    """Bytes that are more than bytes."""


class Shouts:
    def transform(self, _: object, __: object, payload: bytes) -> bytes:
        return Shout(payload.upper())


async def test_a_payload_of_a_class_of_its_own_is_heard_as_bytes(tmp_path: Path) -> None:
    """It was acknowledged, and everybody who should have heard it heard nothing more."""
    async with (
        asyncio.timeout(20),
        ChannelServer(tmp_path, options(), modulator=Shouts()) as server,
        await Client.connect(address(server), username="ann") as ann,
        await Client.connect(address(server), username="bob") as bob,
    ):
        await ann.join("ops")
        await bob.join("ops")
        await ann.broadcast("ops", b"hi")
        async for message in bob.messages():
            assert type(message.payload) is bytes
            assert message.payload == b"HI"
            break


async def test_a_client_that_cannot_be_told_what_a_channel_says_is_let_go(tmp_path: Path, monkeypatch: Any) -> None:
    """Never left connected and deaf."""
    async with (
        asyncio.timeout(20),
        ChannelServer(tmp_path, options()) as server,
        await Raw.open(server) as bob,
        await Client.connect(address(server), username="ann") as ann,
    ):
        await ann.join("ops")
        await bob.login("bob")
        await bob.ask("JOIN id=1 channel=!ops@localhost")
        (shell,) = [shell for shell in server.clients if str(shell.link.nid) == "bob@localhost"]
        monkeypatch.setattr(shell.link, "deliver", lambda _: 1 / 0)
        assert await ann.broadcast("ops", b"hi") == 1
        assert await bob.frame() == b"ERROR reason=INTERNAL_SERVER_ERROR\n"
        assert await bob.ended()
        assert await ann.members("ops") == ["ann@localhost"]


class Stops:
    def authenticate(self, _: str) -> str:
        raise StopIteration


async def test_a_modulator_that_raises_stop_iteration_is_an_answer_at_once(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(20),
        ChannelServer(tmp_path, options(modulator_timeout=60), modulator=Stops()) as server,
        await Raw.open(server) as raw,
    ):
        await raw.ask("CONNECT version=1")
        assert "INTERNAL_SERVER_ERROR" in await raw.ask("AUTH token=ann")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import sys\nsys.exit(3)\n", r"SystemExit\(3\) .*halfdone.py, line 2"),
        ("class Door:\n    def __init__(self): raise SystemExit('no')\n", "it cannot be made: no"),
        ("1 / 0\n", r"ZeroDivisionError\('division by zero'\) .*halfdone.py, line 1"),
        ("class Door(:\n", r"invalid syntax \(halfdone.py, line 1\)"),
    ],
    ids=["exit", "exit in the class", "fault", "syntax"],
)
async def test_a_module_that_cannot_be_loaded_is_told_with_its_place(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start it was a traceback, and a module that ends its process ended the server at a reload."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "halfdone.py"
    try:
        module.write_text("class Door:\n    def authenticate(self, token): return token\n")
        async with ChannelServer(tmp_path / "data", options(), modulator="halfdone:Door") as server:
            module.write_text(text)
            (problem,) = server.reload()
            assert re.search(f"^modulator halfdone:Door: {why}.*; the one in use stays$", problem)
            async with await Client.connect("plain://" + server.addresses["channels-plain"], token="ann") as ann:
                assert ann.nid == "ann@localhost"
        del sys.modules["halfdone"]
        with pytest.raises(OptionsError, match=why):
            load_modulator("halfdone:Door")
    finally:
        sys.modules.pop("halfdone", None)

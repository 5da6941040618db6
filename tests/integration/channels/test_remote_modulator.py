"""Promise: modulators of the original's kind work with our server unchanged, and ours serve servers of that kind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from wire_use import SECONDS, Raw, options

from penstock.channels.wire import Challenge, ChannelServer, Client, ModulatorLink, WireSettings, counts
from penstock.channels.wire.remote import ModulatorServer, send_direct
from penstock.errors import LockedError, NotConnected, Refused
from penstock.net import Target
from penstock.testing.packed import read_cases, unpack

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-wire"
CASES = {case["name"]: case for case in read_cases(VECTORS / "conversations.jsonl")}
FAILED = b'ERROR detail=\\"authentication error: INTERNAL_SERVER_ERROR\\" reason=INTERNAL_SERVER_ERROR\n'
TIMES = re.compile(rb"timestamp=\d+")


class Modulator:
    """A modulator that says what it is told to say; its frames are looked at by the test."""

    def __init__(self, path: Path) -> None:
        self.path, self.raws = str(path), asyncio.Queue[Raw]()

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_unix_server(self.accept, self.path, limit=1 << 20)
        return self

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.raws.put_nowait(Raw(reader, writer))

    async def __aexit__(self, *_: object) -> None:
        self.server.close()


def masked(frame: bytes) -> bytes:
    return TIMES.sub(b"timestamp=#", frame)


@pytest.mark.parametrize("name", ["mod_challenge", "mod_direct", "mod_events", "mod_payload"])
async def test_a_recorded_conversation_with_a_modulator_goes_the_same_way(name: str, tmp_path: Path) -> None:
    frames = json.loads(unpack(CASES[name]["frames"]))
    raws: dict[str, Raw] = {}
    early: dict[str, list[bytes]] = {}
    m2s = WireSettings(max_payload_size=65_536, keep_alive_interval=30.0)
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"), m2s_socket_path=str(tmp_path / "m2s"), m2s=m2s)
    async with Modulator(tmp_path / "s2m") as modulator:
        server = ChannelServer(tmp_path / "data", options(modulator=link))
        starting = asyncio.create_task(server.start())
        async with asyncio.timeout(SECONDS):
            raws["mod1"] = await modulator.raws.get()
        try:
            for way, conn, data_hex, note in frames:
                data = bytes.fromhex(data_hex)
                if conn not in raws and way in ("c>s", "s>c"):
                    await starting
                    raws[conn] = await Raw.open(server)
                elif conn not in raws:
                    raws[conn] = Raw(*await asyncio.open_unix_connection(str(tmp_path / "m2s")))
                raw = raws[conn]
                if way in ("c>s", "m>s"):
                    raw.write(data)
                elif data:
                    waiting = early.setdefault(conn, [])
                    if masked(data) in map(masked, waiting):
                        waiting.pop([masked(frame) for frame in waiting].index(masked(data)))
                        continue
                    frame = await raw.frame()
                    while masked(frame) != masked(data) and frame.startswith(b"EVENT "):  # it may overtake the answer
                        waiting.append(frame)
                        frame = await raw.frame()
                    assert masked(frame) == masked(data), f"{conn}: {frame!r} instead of {data!r}"
                elif conn == "b_noname":  # where the process of the original ends, ours answers
                    last = await raw.frame()
                    assert last in (b"", FAILED)
                elif "closed" in note:
                    assert await raw.ended()
            assert server.health().state.serves
        finally:
            for raw in raws.values():
                await raw.gone()
            await server.stop()


class Everything:
    """A modulator of ours that does all there is."""

    protocol = "everything/1"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.direct_payloads: list[tuple[str, bytes]] = []

    async def authenticate(self, token: str) -> str | Challenge | None:
        if token == "start":
            return Challenge("salt 42")
        return token if token in ("ann", "bob") else None

    def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes | None:
        return None if payload == b"bad" else payload[::-1] if payload.startswith(b"turn") else payload

    def on_event(self, event: Any) -> None:
        self.events.append(f"{event.kind} {event.nid}")

    def direct(self, nid: Any, payload: bytes) -> bool:
        self.direct_payloads.append((nid.username, payload))
        return payload != b"no"


async def test_our_modulator_serves_our_server_over_the_link_of_the_original(tmp_path: Path) -> None:
    everything = Everything()
    async with ModulatorServer(everything, socket_path=str(tmp_path / "s2m"), sends_direct=True) as modulator:
        assert modulator.operation_mask == 31
        link = ModulatorLink(socket_path=str(tmp_path / "s2m"), m2s_address="127.0.0.1:0", m2s_secret="psst")
        async with ChannelServer(tmp_path / "data", options(modulator=link)) as server:
            address = "plain://" + server.addresses["channels-plain"]
            async with (
                await Client.connect(address, token="ann") as ann,
                await Client.connect(address, token="bob") as bob,
            ):
                assert ann.server["application_protocol"] == "everything/1"
                await ann.join("ops")
                await bob.join("ops")
                await ann.broadcast("ops", b"plain")
                await ann.broadcast("ops", b"turn me")
                heard = bob.messages()
                assert [(await anext(heard)).payload for _ in range(2)] == [b"plain", b"em nrut"]
                await ann.direct(b"yes")
                assert everything.direct_payloads == [("ann", b"yes")]
                await send_direct(Target.parse(server.addresses["m2s"], {"tcp": 1}), "psst", ["ann", "bob"], b"for you")
                news = ann.news()
                while not hasattr(found := await anext(news), "payload"):
                    pass
                assert (found.sender, found.payload) == ("localhost", b"for you")  # type: ignore[union-attr]
                with pytest.raises(Refused, match="BAD_REQUEST"):
                    await ann.broadcast("ops", b"bad")
            with pytest.raises(Refused, match="UNAUTHORIZED: salt 42"):
                await Client.connect(address, token="start")
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await Client.connect(address, token="eve")
            wrong = Target.parse(server.addresses["m2s"], {"tcp": 1})
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await send_direct(wrong, "guess", ["ann"], b"x")
        assert everything.events[:2] == ["MEMBER_JOINED ann@localhost", "MEMBER_JOINED bob@localhost"]


async def test_a_server_without_its_modulator_does_not_start(tmp_path: Path) -> None:
    link = ModulatorLink(socket_path=str(tmp_path / "nobody"), backoff_initial_delay=0.001, backoff_max_retries=3)
    with pytest.raises(NotConnected, match="modulator at"):
        await ChannelServer(tmp_path / "data", options(modulator=link)).start()


async def test_a_modulator_that_goes_away_is_an_answer_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"), backoff_initial_delay=0.001, backoff_max_retries=2)
    modulator = ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m"))
    await modulator.start()
    async with ChannelServer(tmp_path / "data", options(modulator=link)) as server:
        await modulator.stop()
        async with await Raw.open(server) as raw:
            await raw.ask("CONNECT version=1")
            assert "INTERNAL_SERVER_ERROR" in await raw.ask("AUTH token=ann")
        async with (
            ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m")),
            await Client.connect("plain://" + server.addresses["channels-plain"], token="ann") as ann,
        ):
            assert ann.nid == "ann@localhost"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"S2M_CONNECT version=999\n", b"ERROR reason=UNSUPPORTED_PROTOCOL_VERSION\n"),
        (b"S2M_CONNECT version=1\n", b"ERROR reason=UNAUTHORIZED\n"),
        (b"UNKNOWN\n", b'ERROR detail=\\"unknown message\\" reason=BAD_REQUEST\n'),
        (b"S2M_AUTH id=1 token=x\n", b"ERROR reason=UNEXPECTED_MESSAGE\n"),
        (b"x" * 8192, b'ERROR detail=\\"max message size exceeded\\" reason=POLICY_VIOLATION\n'),
        (b"", b'ERROR detail=\\"connection timeout\\" reason=TIMEOUT\n'),
    ],
    ids=["version", "secret", "unknown", "too soon", "too long", "silent"],
)
async def test_a_modulator_of_ours_answers_a_wrong_server_as_the_original_does(sent: bytes, answer: bytes) -> None:
    settings = WireSettings(connect_timeout=0.3 if not sent else 30.0)
    async with ModulatorServer(Everything(), "127.0.0.1:0", secret="psst", settings=settings) as modulator:
        host, _, port = modulator.address.rpartition(":")
        async with Raw(*await asyncio.open_connection(host, int(port))) as raw:
            raw.write(sent)
            assert await raw.frame() == answer
            assert await raw.ended()


LONG = b'ERROR detail=\\"max message size exceeded\\" reason=POLICY_VIOLATION\n'
BUSY = b'ERROR reason=SERVER_OVERLOADED detail=\\"max connections reached\\"\n'


@asynccontextmanager
async def links(kind: str, root: Path, settings: WireSettings) -> AsyncIterator[str]:
    """Serve one of the two links of modulators and give the path of its socket."""
    path = str(root / kind)
    if kind == "s2m":
        async with ModulatorServer(Everything(), socket_path=path, settings=settings):
            yield path
        return
    async with ModulatorServer(Everything(), socket_path=str(root / "other")):
        link = ModulatorLink(socket_path=str(root / "other"), m2s_socket_path=path, m2s=settings)
        async with ChannelServer(root / "data", options(modulator=link)):
            yield path


@pytest.mark.parametrize("kind", ["s2m", "m2s"])
async def test_a_link_has_the_limits_of_a_client(kind: str, tmp_path: Path) -> None:
    """6.7 and 6.8: connect timeout, ping timeout, max connections, a line that is too long."""
    hello = f"{kind.upper()}_CONNECT version=1"
    settings = WireSettings(
        connect_timeout=0.1,
        keep_alive_interval=0.1,
        min_keep_alive_interval=0.05,
        max_connections=1,
        max_message_size=512,
    )
    async with links(kind, tmp_path, settings) as path:
        async with Raw(*await asyncio.open_unix_connection(path)) as raw:
            assert await raw.frame() == b'ERROR detail=\\"connection timeout\\" reason=TIMEOUT\n'
            assert await raw.ended()
        async with Raw(*await asyncio.open_unix_connection(path)) as raw:
            assert (await raw.ask(hello)).startswith(f"{kind.upper()}_CONNECT_ACK ")
            async with Raw(*await asyncio.open_unix_connection(path)) as second:
                assert await second.frame() == BUSY
                assert await second.ended()
            assert (await raw.frame()).startswith(b"PING id=")
            assert await raw.frame() == b'ERROR detail=\\"ping timeout\\" reason=TIMEOUT\n'
            assert await raw.ended()
        async with Raw(*await asyncio.open_unix_connection(path)) as raw:
            raw.write(b"x" * 512)
            assert await raw.frame() == LONG
            assert await raw.ended()


async def test_a_modulator_of_ours_answers_every_message_of_the_link(tmp_path: Path) -> None:
    """6.8: what each message of a server is answered, byte for byte."""
    async with (
        links("s2m", tmp_path, WireSettings()) as path,
        Raw(*await asyncio.open_unix_connection(path)) as raw,
    ):
        assert await raw.ask("S2M_CONNECT heartbeat_interval=60000 version=1") == (
            "S2M_CONNECT_ACK application_protocol=everything/1 heartbeat_interval=60000 max_inflight_requests=100 "
            "max_message_size=8192 max_payload_size=65536 operation_mask=15"
        )
        forward = "S2M_FORWARD_BROADCAST_PAYLOAD id={} channel=ops from=ann@localhost length={}\n{}\n"
        for asked, answer in [
            ("S2M_AUTH id=1 token=ann", "S2M_AUTH_ACK id=1 succeeded=true username=ann"),
            ("S2M_AUTH id=2 token=eve", "S2M_AUTH_ACK id=2 succeeded=false"),
            ("S2M_AUTH id=3 token=start", 'S2M_AUTH_ACK id=3 challenge=\\"salt 42\\" succeeded=false'),
            (forward.format(4, 5, "plain"), "altered_payload=false altered_payload_length=0 valid=true"),
            (forward.format(5, 4, "turn"), "altered_payload=true altered_payload_length=4 valid=true\nnrut"),
            (forward.format(6, 3, "bad"), "altered_payload=false altered_payload_length=0 valid=false"),
            ("S2M_FORWARD_EVENT id=7 channel=!a@localhost kind=CHANNEL_DELETED", "S2M_FORWARD_EVENT_ACK id=7"),
            ("S2M_MOD_DIRECT id=8 from=ann length=3\nyes\n", "S2M_MOD_DIRECT_ACK id=8 valid=true"),
            ("S2M_MOD_DIRECT id=9 from=ann length=2\nno\n", "S2M_MOD_DIRECT_ACK id=9 valid=false"),
        ]:
            number = asked.split("id=")[1].split()[0]
            start = f"S2M_FORWARD_BROADCAST_PAYLOAD_ACK id={number} " if answer.startswith("altered") else ""
            assert await raw.ask(asked) == start + answer


async def test_a_payload_of_a_modulator_reaches_its_targets(tmp_path: Path) -> None:
    """6.7: M2S_MOD_DIRECT with two targets is acknowledged and handed on; full names match nobody."""
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"), m2s_socket_path=str(tmp_path / "m2s"))
    async with (
        ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m")),
        ChannelServer(tmp_path / "data", options(modulator=link)) as server,
        await Raw.open(server) as ann,
        await Raw.open(server) as bob,
        Raw(*await asyncio.open_unix_connection(str(tmp_path / "m2s"))) as sender,
    ):
        for raw, name in ((ann, "ann"), (bob, "bob")):
            await raw.ask("CONNECT version=1")
            await raw.ask(f"AUTH token={name}")
            await raw.ask("CHANNELS id=1")
        assert (await sender.ask("M2S_CONNECT version=1")).startswith("M2S_CONNECT_ACK heartbeat_interval=30000 ")
        assert (
            await sender.ask("M2S_MOD_DIRECT id=1 length=2 targets:1=ann@localhost\nno\n") == "M2S_MOD_DIRECT_ACK id=1"
        )
        assert await sender.ask("M2S_MOD_DIRECT id=2 length=2 targets:2=ann bob\nhi\n") == "M2S_MOD_DIRECT_ACK id=2"
        for raw in (ann, bob):
            assert await raw.frame() == b"MOD_DIRECT from=localhost length=2\nhi\n"


async def test_a_modulator_is_not_asked_for_what_it_does_not_offer(tmp_path: Path) -> None:
    class Gate:
        def authorize_broadcast(self, nid: Any, channel: Any) -> bool:
            return str(nid) == "ann@localhost"

    async with ModulatorServer(Gate(), socket_path=str(tmp_path / "s2m")) as modulator:
        assert modulator.operation_mask == 2
        for asked in (
            "S2M_AUTH id=1 token=x",
            "S2M_FORWARD_EVENT id=1 channel=!a@localhost kind=CHANNEL_DELETED",
            "S2M_MOD_DIRECT id=1 from=ann length=1\nx\n",
        ):
            async with Raw(*await asyncio.open_unix_connection(str(tmp_path / "s2m"))) as raw:
                await raw.ask("S2M_CONNECT version=1")
                assert await raw.ask(asked) == "ERROR reason=UNEXPECTED_MESSAGE"
                assert await raw.ended()
        async with Raw(*await asyncio.open_unix_connection(str(tmp_path / "s2m"))) as raw:
            await raw.ask("S2M_CONNECT version=1")
            for name, valid in (("ann", "true"), ("bob", "false")):
                sent = f"S2M_FORWARD_BROADCAST_PAYLOAD id=2 channel=a from={name}@localhost length=1\nx\n"
                assert (await raw.ask(sent)).endswith(f" valid={valid}")


@pytest.mark.parametrize(
    "token",
    [b"\\'\\\"x\\'", b"t" * 8180],
    ids=["opens a quote", "too long for the link"],
)
async def test_a_token_that_cannot_be_passed_on_is_an_answer_and_the_link_stays(tmp_path: Path, token: bytes) -> None:
    """A line that a modulator cannot read would end the link, and fail what others ask over it."""
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"))
    async with (
        ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m")) as modulator,
        ChannelServer(tmp_path / "data", options(modulator=link)) as server,
        await Raw.open(server) as eve,
        await Raw.open(server) as ann,
    ):
        (before,) = modulator._service.peers
        await eve.ask("CONNECT version=1")
        answer = await eve.ask(b"AUTH token=" + token + b"\n")
        assert "AUTH_ACK" in answer or "INTERNAL_SERVER_ERROR" in answer
        await ann.ask("CONNECT version=1")
        assert await ann.ask("AUTH token=ann") == "AUTH_ACK nid=ann@localhost succeeded=true"
        assert modulator._service.peers == {before}


async def test_a_modulator_that_went_without_a_word_is_dialled_again(tmp_path: Path) -> None:
    hello = (
        b"S2M_CONNECT_ACK application_protocol=x/1 heartbeat_interval=40 max_inflight_requests=10 "
        b"max_message_size=8192 max_payload_size=65536 operation_mask=1\n"
    )
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"), timeout=SECONDS)
    async with Modulator(tmp_path / "s2m") as modulator, asyncio.timeout(SECONDS):
        server = ChannelServer(tmp_path / "data", options(modulator=link))
        starting = asyncio.create_task(server.start())
        first = await modulator.raws.get()
        await first.ask(hello)
        await starting
        try:
            assert await first.ended()  # no ping for three of its intervals: the host may be gone
            async with await Raw.open(server) as ann:
                await ann.ask("CONNECT version=1")
                ann.write("AUTH token=ann\n")
                second = await modulator.raws.get()
                await second.ask(hello)
                assert (await second.frame()).startswith(b"S2M_AUTH id=1 token=ann")
                second.write(b"S2M_AUTH_ACK id=1 succeeded=true username=ann\n")
                assert await ann.frame() == b"AUTH_ACK nid=ann@localhost succeeded=true\n"
                await second.gone()
        finally:
            await first.gone()
            await server.stop()


async def test_a_modulator_that_does_not_read_is_let_go_and_counted(tmp_path: Path) -> None:
    m2s = WireSettings(outbound_message_queue_size=2)
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"), m2s_socket_path=str(tmp_path / "m2s"), m2s=m2s)
    before = counts.M2S_QUEUE_FULL.value()
    async with (
        ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m")),
        ChannelServer(tmp_path / "data", options(modulator=link)) as server,
        Raw(*await asyncio.open_unix_connection(str(tmp_path / "m2s"))) as sender,
    ):
        assert (await sender.ask("M2S_CONNECT version=1")).startswith("M2S_CONNECT_ACK ")
        assert server._m2s_service is not None
        (shell,) = server._m2s_service.peers
        shell._slow = True  # as when the system takes no more for it
        for number in range(1, 5):
            sender.write(f"M2S_MOD_DIRECT id={number} length=2 targets:1=ann\nhi\n")
        assert await sender.frame() == b"ERROR reason=OUTBOUND_QUEUE_FULL\n"
        assert await sender.ended()
        assert counts.M2S_QUEUE_FULL.value() == before + 1


@pytest.mark.parametrize("name", ["ann\nS2M_AUTH_ACK id=2 succeeded=true username=root", "", "a\"b'c:d*e f", "\ud800"])
async def test_a_name_that_no_line_can_carry_is_a_failure_of_its_own(name: str, tmp_path: Path) -> None:
    """It comes from whoever signs tokens, and a line end in it was the answer to another question."""

    class Names:
        def authenticate(self, token: str) -> str:
            return name

    async with (
        ModulatorServer(Names(), socket_path=str(tmp_path / "s2m")),
        Raw(*await asyncio.open_unix_connection(str(tmp_path / "s2m"))) as raw,
    ):
        await raw.ask("S2M_CONNECT version=1")
        assert await raw.ask("S2M_AUTH id=1 token=x") == "ERROR id=1 reason=INTERNAL_SERVER_ERROR"
        assert await raw.ask("S2M_AUTH id=3 token=x") == "ERROR id=3 reason=INTERNAL_SERVER_ERROR"


async def test_a_server_that_does_not_start_lets_go_of_its_modulator(tmp_path: Path) -> None:
    link = ModulatorLink(socket_path=str(tmp_path / "s2m"))
    async with (
        ModulatorServer(Everything(), socket_path=str(tmp_path / "s2m")) as modulator,
        ChannelServer(tmp_path / "data", options()),
    ):
        with pytest.raises(LockedError):
            await ChannelServer(tmp_path / "data", options(modulator=link)).start()
        async with asyncio.timeout(SECONDS):
            while modulator._service.peers:
                await asyncio.sleep(0.001)

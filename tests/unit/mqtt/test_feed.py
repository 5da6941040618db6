"""Feeds: logs into brokers, through a cursor."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.disk import disk_for
from penstock.errors import OptionsError, ReplacedError
from penstock.lifecycle import State
from penstock.log import open_log
from penstock.log.detect import open_writer
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.sidecar import sidecar_of
from penstock.log.xchannel import Writer, WriterOptions
from penstock.mqtt import Client, Feed, FeedSpec, MqttServer, RemoteSpec, ServerOptions, TapSpec
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Properties
from penstock.types import Op


@contextlib.asynccontextmanager
async def server(**options: Any) -> AsyncIterator[MqttServer]:
    """Serve on a free port."""
    made = MqttServer(ServerOptions(port=0, **options))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def write(path: str, *envelopes: Envelope, format: str = "xchannel") -> None:
    writer = open_writer(path, format=format, content="envelope/1")
    writer.append_many([encode_envelope(each) for each in envelopes])
    writer.close()


def cursor(path: str, name: str = "mqtt-feed") -> int | None:
    return sidecar_of(disk_for(path), path).read_cursor(name)


async def some(client: Client, count: int) -> list[tuple[str, bytes, bool]]:
    found: list[tuple[str, bytes, bool]] = []
    async with asyncio.timeout(30):
        async for message in client.messages():
            found.append((message.topic, message.payload, message.retain))
            if len(found) == count:
                return found
    raise AssertionError


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
async def test_records_become_retained_messages_and_deletes_clear_them(tmp_path: Path, format: str) -> None:
    path = f"{tmp_path}/alerts"
    write(path, *(Envelope(b"pump/%d" % n, b"hot %d" % n) for n in range(3)), Envelope(b"pump/1", op=Op.DELETE),
          Envelope(b"a/#", b"no topic"), format=format)  # fmt: skip
    async with server(feeds=(FeedSpec(log=path, topic="alerts/{key}", retain=True),)) as made:
        assert made.attached is not None
        feed: Any = made.attached.parts[0]
        await feed.caught_up()
        kept = {run.run.topic: run.run.payload() for run in made.broker.retained.match("alerts/#") if run.run}
        assert kept == {b"alerts/pump/0": b"hot 0", b"alerts/pump/2": b"hot 2"}
        assert feed.passed == {"no topic": 1}
        with open_log(path) as log:
            assert cursor(path) == log.next_position


async def test_a_feed_that_failed_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, left, step = f"{tmp_path}/log", [KeyError("nobody expected this")] * 2, Feed.step
    write(path, Envelope(b"a", b"1"))

    async def sometimes(feed: Feed) -> int:
        if left:
            raise left.pop()
        return await step(feed)

    monkeypatch.setattr(Feed, "step", sometimes)
    monkeypatch.setattr("penstock.mqtt.attached.AGAIN_SECONDS", (0.01, 0.1))
    async with server(feeds=(FeedSpec(log=path),)) as made, Client(made.addresses["mqtt"]) as client:
        await client.subscribe("#", qos=1)
        async with asyncio.timeout(30):
            while made.describe()["attached"][f"feed:{path}"]["published"] != 1:
                await asyncio.sleep(0.01)
        assert (left, made.health().state) == ([], State.READY)


ODD_HEADERS: list[dict[str, bytes]] = [
    {"qos": b"high"}, {"message_expiry": b"-5"}, {"message_expiry": b"99999999999"}, {"payload_format": b"7"},
    {"content_type": b"x" * 70000}, {"content_type": b"\xff"}, {"response_topic": b"a\0b"}, {"client": b"\xff"},
    {"correlation_data": b"x" * 70000}, {"user.name": b"x" * 70000}, {"qos": b"-1"},
]  # fmt: skip


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
async def test_records_that_make_no_message_are_counted_and_keep_nobody_back(tmp_path: Path, format: str) -> None:
    path = f"{tmp_path}/log"
    odd = [encode_envelope(Envelope(b"odd", b"no", headers=headers)) for headers in ODD_HEADERS]
    cut = encode_envelope(Envelope(b"odd", b"no", headers={"qos": b"1"})).replace(b"\x03\0qos", b"\xff\0qos")
    good = [encode_envelope(Envelope(b"good", b"%d" % number)) for number in range(4)]
    writer: Any
    if format == "messagelog":
        writer = MessageLog.open(path, MessageLogOptions(content="envelope/1", max_payload_bytes=1 << 20))
    else:
        writer = open_writer(path, format=format, content="envelope/1")
    with writer:
        writer.append_many([good[0], b"junk", b"\x01", good[1], *odd, cut, good[2]])
    async with server() as made, Client(made.addresses["mqtt"]) as client:
        await client.subscribe("#", qos=1)
        feed = Feed(FeedSpec(log=path), broker=made.broker)
        await feed.start()
        assert [payload for _, payload, _ in await some(client, 3)] == [b"0", b"1", b"2"]
        await feed.caught_up()
        assert feed.passed == {"no envelope": 2, "malformed headers": len(odd) + 1}
        assert feed.health().state.value == "ready"
        with open_log(path) as log:
            assert cursor(path) == log.next_position
        await feed.stop()


async def test_a_feed_goes_on_where_its_cursor_is(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    write(path, Envelope(b"a", b"1"), Envelope(b"a", b"2"))
    spec = FeedSpec(log=path)
    async with server() as made, Client(made.addresses["mqtt"]) as client:
        await client.subscribe("#", qos=1)
        for expected in ([b"1", b"2"], [b"3"]):
            feed = Feed(spec, broker=made.broker)
            await feed.start()
            assert [payload for _, payload, _ in await some(client, len(expected))] == expected
            await feed.caught_up()
            await feed.stop()
            if expected != [b"3"]:
                write(path, Envelope(b"a", b"3"))


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
async def test_a_feed_whose_log_came_back_from_a_backup_says_so_and_publishes_nothing(
    tmp_path: Path, format: str
) -> None:
    here, kept, path = tmp_path / "here", tmp_path / "kept", f"{tmp_path}/here/log"
    here.mkdir()
    write(path, *(Envelope(b"a", b"%d" % number) for number in range(5)), format=format)
    shutil.copytree(here, kept)
    write(path, *(Envelope(b"a", b"%d" % number) for number in range(5, 10)), format=format)
    async with server() as made, Client(made.addresses["mqtt"]) as client:
        await client.subscribe("#", qos=1)
        feed = Feed(FeedSpec(log=path), broker=made.broker)
        await feed.start()
        assert len(await some(client, 10)) == 10
        await feed.caught_up()
        await feed.stop()
        write(f"{kept}/log", *(Envelope(b"a", b"other %d" % number) for number in range(9)), format=format)
        for file in kept.rglob("*"):
            if file.is_file():
                shutil.copy2(file, here / file.relative_to(kept))
        feed = Feed(FeedSpec(log=path), broker=made.broker)
        with pytest.raises(ReplacedError, match=r"to begin anew, remove .*cursor-mqtt-feed"):
            await feed.step()
        await feed.start()
        await feed.ready()
        assert feed.health().state is State.DEGRADED
        assert feed.published == 0
        next(here.rglob("*cursor-mqtt-feed")).unlink()
        found = [payload for _, payload, _ in await some(client, 14)]
        assert found == [b"%d" % n for n in range(5)] + [b"other %d" % n for n in range(9)]
        await feed.stop()


async def test_a_feed_remembers_only_what_no_power_cut_takes_back(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    options = WriterOptions(content="envelope/1", sync="interval", sync_seconds=3600)
    async with server() as made:
        with Writer.open(path, options) as writer:
            first, second = (encode_envelope(Envelope(b"a", payload)) for payload in (b"1", b"2"))
            position = writer.append(first)
            writer.sync()
            writer.append(second)
            feed = Feed(FeedSpec(log=path), broker=made.broker)
            while await feed.step():
                pass
            seen = sidecar_of(disk_for(path), path).cursor_seen("mqtt-feed")
            assert (feed.published, seen is not None and seen.position) == (2, position)
            await feed.stop()


async def test_a_tapped_message_comes_out_of_a_feed_as_it_went_in(tmp_path: Path) -> None:
    given = Properties(content_type="t", user=(("a", "1"), ("a", "2")), correlation_data=b"\0", message_expiry=77)
    path = f"{tmp_path}/log"
    async with server(taps=(TapSpec(filter="in/#", path=path),)) as made, Client(made.addresses["mqtt"]) as client:
        await client.publish("in/1", b"x", qos=2, retain=True, properties=given)
        await client.subscribe("out/#", qos=2)
        feed = Feed(FeedSpec(log=path, topic="out/{client}/{key}"), broker=made.broker)
        await feed.start()
        async with asyncio.timeout(30):
            message = await anext(aiter(client.messages()))
        assert (message.topic, message.payload, message.qos) == (f"out/{client.client_id}/in/1", b"x", 2)
        assert message.properties == given
        await feed.stop()


async def test_a_feed_waits_for_its_log_and_its_broker_and_moves_only_with_the_acknowledgement(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    async with server() as made:
        address = made.addresses["mqtt"]
    spec = FeedSpec(log=path, to=RemoteSpec(url=f"mqtt://{address}", reconnect_seconds=(0.01, 0.1)))
    feed = Feed(spec)
    await feed.start()
    await feed.ready()
    assert "nothing here" in feed.health().reason
    write(path, *(Envelope(b"t/%d" % (n % 3), b"%d" % n) for n in range(100)))
    async with asyncio.timeout(30):
        while "refused" not in feed.health().reason.lower() and "connect" not in feed.health().reason.lower():
            await asyncio.sleep(0.01)
    with open_log(path) as log:
        assert cursor(path) == log.first_position
    port = int(address.rpartition(":")[2])
    again = MqttServer(ServerOptions(port=port))
    await again.start()
    await feed.caught_up()
    assert again.broker.counts.publish_received == 100
    with open_log(path) as log:
        assert cursor(path) == log.next_position
    await feed.stop()
    await again.stop()


async def test_a_message_that_the_other_broker_never_takes_is_passed_over_and_counted(tmp_path: Path) -> None:
    path, acl = f"{tmp_path}/log", tmp_path / "acl"
    acl.write_text("topic readwrite ok/#\n")
    large = [Envelope(b"ok/%d" % number, bytes(2000 + number)) for number in range(3)]
    write(path, Envelope(b"ok/1", b"1"), Envelope(b"no/1", b"2"), Envelope(b"no/1", b"3"), *large, Envelope(b"ok/1"))
    async with server(acl=str(acl), broker=BrokerOptions(max_packet_bytes=1000)) as made:
        feed = Feed(FeedSpec(log=path, to=RemoteSpec(url=made.addresses["mqtt"])))
        await feed.start()
        await feed.caught_up()
        assert feed.passed == {"NOT_AUTHORIZED": 2, "no message for that server": 3}
        assert feed.published == 2
        await feed.stop()


def test_specs_are_checked() -> None:
    bad: list[dict[str, Any]] = [{"topic": "a/{x}"}, {"topic": ""}, {"qos": 3}, {"batch": 0}, {"start": "middle"}]
    for each in bad:
        with pytest.raises(OptionsError):
            FeedSpec(log="x", **each)


async def test_with_always_an_acknowledgement_waits_for_the_disk(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    tap = TapSpec(filter="#", path=path, format="messagelog", sync="always")
    async with server(taps=(tap,)) as made, Client(made.addresses["mqtt"]) as client:
        for number in range(3):
            await client.publish("a", b"%d" % number, qos=1 + number % 2)
            with open_log(path) as log:
                assert log.durable_position == log.next_position


async def test_a_tap_that_is_taken_away_keeps_nobody_waiting_for_its_disk(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    tap = TapSpec(filter="#", path=path, sync="always")
    began, may_go_on = threading.Event(), threading.Event()
    async with server(taps=(tap,)) as made, Client(made.addresses["mqtt"]) as client:
        assert made.attached is not None
        part: Any = made.attached.parts[0]
        log = part._logs[path]
        sync = log.sync

        def slowly() -> Any:
            began.set()
            may_go_on.wait(30)
            return sync()

        log.sync = slowly
        published = [asyncio.create_task(client.publish("a", b"1", qos=1))]
        await asyncio.to_thread(began.wait, 30)
        published.append(asyncio.create_task(client.publish("a", b"2", qos=1)))
        async with asyncio.timeout(30):
            while part.records < 2:
                await asyncio.sleep(0.005)
            without = msgspec.structs.replace(made.options, taps=())
            taken_away = asyncio.create_task(made.use_attached(without, 1.0))
            await asyncio.sleep(0)
            may_go_on.set()
            await asyncio.gather(*published, taken_away)
        assert made.attached.parts == []


async def test_taps_feeds_bridges_and_mirrors_are_said_in_a_configuration(tmp_path: Path) -> None:
    import tomllib

    table = tomllib.loads(f"""
        port = 0
        [[taps]]
        filter = ["plant/#", "site/#"]
        path = "{tmp_path}/by/{{client}}"
        on_failure = "refuse"
        [taps.options]
        roll_bytes = 1048576
        [[feeds]]
        log = "{tmp_path}/alerts"
        topic = "alerts/{{key}}"
        retain = true
        [[bridges]]
        name = "hub"
        remote = {{url = "mqtt://127.0.0.1:1", version = "3.1.1"}}
        send = [{{filter = "plant/#", remote_prefix = "site-7/"}}]
        [[mirrors]]
        place = "{tmp_path}/buckets"
        bucket = "devices"
        prefix = "state/"
        """)
    made = MqttServer(msgspec.convert(table, ServerOptions), data=f"{tmp_path}/data")
    await made.start()
    assert made.attached is not None
    names = [part.name for part in made.attached.parts]
    assert names == [f"tap:{tmp_path}/by/{{client}}", "mirror:devices", "bridge:hub", f"feed:{tmp_path}/alerts"]
    about = made.describe()["attached"]
    assert about["bridge:hub"]["state"] == "degraded"
    assert made.health().state.value == "degraded"
    await made.stop()
    assert {str(part.health().state) for part in made.attached.parts} == {"stopped"}
    with pytest.raises(OptionsError, match="data directory"):
        await MqttServer(msgspec.convert(table, ServerOptions)).start()

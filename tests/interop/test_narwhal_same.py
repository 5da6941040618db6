"""The same random conversations with the original server and with ours: every client hears the same from both.

Two differences are left out of what is asked, both meant (docs/formats/channel-wire.md): names of other domains on
whose behalf a member joins, and a second request behind one that ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
from pathlib import Path

import pytest
from narwhal_use import BUILT, SECONDS, original
from wire_use import PlainAuthenticator, Raw, plain_token

from penstock.channels import ChannelServer, Limits, WireSettings

pytestmark = pytest.mark.skipif(not BUILT, reason="PENSTOCK_NARWHAL does not say where the original was built")

STEPS = 400
CHANNELS = ["!a@localhost"] * 4 + ["!b@localhost"] * 3 + ["!a/b@localhost", "!z@localhost"]
ODD_CHANNELS = ["!a@far.io", "a@localhost", "!@localhost", "!a_b@localhost", "!a@LOCALHOST", "!a@[::1]:5"]
NIDS = ["ann@localhost", "bob@localhost", "eve@localhost"]
LISTED = [*NIDS, "localhost", "ann@far.io", "far.io", "@localhost", "a@b@c.io", "ann"]
SMALL = {
    "max_channels": 3, "max_clients_per_channel": 3, "max_channels_per_client": 2, "max_payload_size": 256,
    "max_persist_messages": 5, "max_message_flush_interval": 1000, "max_history_limit": 3,
}  # fmt: skip
WIRE = {"max_message_size": 1024, "max_payload_size": 256, "rate_limit": 0}
LIMITS = "[c2s-server.limits]\npayload_pool_memory_budget = 1048576\n" + "".join(
    f"{name} = {value}\n" for name, value in (SMALL | WIRE).items()
)
ENDS = (b" =x", b" foo=bar", b" foo:2=a b", b" foo:0=", b" id:2=5 6", b"\0junk", b" \0junk", b" foo=\\", b" x=\\\"\\\"",
        b" x=\\\"a b\\\"id=3", b" foo", b" f-o=1", b" :=1", b" foo:+2=a b", b" foo:x=1", b" foo:=1")  # fmt: skip
QUOTED = re.compile(rb"channel=(\S+)")


def some(rng: random.Random, name: str, *values: object) -> str:
    """Return a parameter, or leave it out."""
    return "" if rng.random() < 0.5 else f" {name}={rng.choice(values)}"


def request(rng: random.Random, number: int) -> bytes:
    """Return something a client may ask, right or wrong."""
    channel = rng.choice(CHANNELS if rng.random() < 0.93 else ODD_CHANNELS)
    head = f" id={number} channel={channel}"
    payload = bytes(rng.choice(b"ab\n\0 \xff") for _ in range(rng.choice((1, 2, 20, 200, 256))))
    match rng.randrange(18):
        case 0 | 1 | 2:
            return (f"JOIN{head}" + some(rng, "on_behalf", *NIDS) * (rng.random() < 0.3)).encode()
        case 3:
            return (f"LEAVE{head}" + some(rng, "on_behalf", *NIDS) * (rng.random() < 0.3)).encode()
        case 4 | 5 | 6:
            length = len(payload) if rng.random() < 0.97 else rng.choice((0, 257, 300))
            return f"BROADCAST{head} length={length}{some(rng, 'qos', 0, 1, 1, 2)}\n".encode() + payload
        case 7 | 8:
            return f"PUSH{head} length={len(payload)}\n".encode() + payload
        case 9:
            paging = some(rng, "page", 0, 1, 2) + some(rng, "page_size", 0, 1, 100, 4294967295)
            return f"CHANNELS id={number}{some(rng, 'owner', 'true', 'false', 'TRUE')}{paging}".encode()
        case 10:
            return f"MEMBERS{head}{some(rng, 'page', 0, 1, 2)}{some(rng, 'page_size', 0, 1, 2, 100)}".encode()
        case 11:
            words = f"{some(rng, 'page', 0, 1, 2)}{some(rng, 'page_size', 0, 1, 50)}"
            return f"GET_CHAN_ACL{head} type={rng.choice(('join', 'publish', 'read', 'x'))}{words}".encode()
        case 12:
            names = rng.choices(LISTED, k=rng.randrange(4))
            nids = f" nids:{len(names)}={' '.join(names)}" if names else ""
            kind, action = rng.choice(("join", "publish", "read")), rng.choice(("add", "remove", "remove", "add", "x"))
            return f"SET_CHAN_ACL{head} type={kind} action={action}{nids}".encode()
        case 13 | 14:
            return (
                f"SET_CHAN_CONFIG{head}{some(rng, 'max_clients', 0, 1, 3, 4)}{some(rng, 'max_payload_size', 20, 256)}"
                f"{some(rng, 'max_persist_messages', 0, 1, 5, 5)}{some(rng, 'message_flush_interval', 0, 100)}"
                f"{some(rng, 'persist', 'true', 'true', 'false')}{some(rng, 'type', 'pubsub', 'fifo', 'x')}"
            ).encode()
        case 15:
            name = rng.choice(("h1", "x" * 5, "x" * 900))
            first, limit = rng.choice((0, 1, 2, 7, 2**64 - 1)), rng.choice((1, 3, 100, 2**32 - 1))
            return f"HISTORY{head} from_seq={first} history_id={name} limit={limit}".encode()
        case 16:
            name = rng.choice(("POP", "POP", "GET_CHAN_LEN", "CLEAR", "CHAN_SEQ", "GET_CHAN_CONFIG", "DELETE"))
            return f"{name}{head}".encode()
    words = (
        "PING id=1",
        "CONNECT version=1",
        "AUTH token=x",
        "JOIN id=0",
        "NOPE",
        "",
        "PONG",
        "MESSAGE",
        "EVENT kind=X",
    )
    return rng.choice(words).encode()


def spelt(rng: random.Random, data: bytes) -> bytes:
    """Return a request in another spelling, which may be right or wrong."""
    line, lf, rest = data.partition(b"\n")
    quote, other = rng.choices(b"\"':*", k=2)
    match rng.randrange(7):
        case 0:
            line = b"\t " + line.replace(b" ", rng.choice((b"  ", b"\t", b"\v", b"\f", b"\r")), 1) + b" \r"
        case 1:
            first, *parts = line.split(b" ")
            line = b" ".join([first, *rng.sample(parts, len(parts))])
        case 2:
            line += rng.choice(ENDS)
        case 3:
            line = line.replace(b"=", b"= ", 1)
        case 4:
            line = re.sub(rb"id=(\d+)", rng.choice((rb"id=+\1", rb"id=00\1", rb"id:1=\1")), line)
        case 5:
            line = QUOTED.sub(lambda found: b"channel=\\%c%s\\%c" % (quote, found[1], quote), line)
        case _:
            line = QUOTED.sub(lambda found: b"channel=\\%c%s\\%c" % (quote, found[1], other), line)
    return line + lf + rest


class Side:
    """One of the two servers, with the same clients on it."""

    def __init__(self, place: str, *, tls: bool, auth: bool) -> None:
        self.host, _, port = place.rpartition(":")
        self.port, self.auth = int(port), auth
        self.context = ssl.create_default_context() if tls else None
        if self.context is not None:
            self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.clients: dict[str, Raw] = {}
        self.heard: dict[str, list[bytes]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, name: str) -> None:
        client = Raw(*await asyncio.open_connection(self.host, self.port, ssl=self.context, limit=1 << 20))
        self.clients[name], self.heard[name] = client, []
        assert (await client.ask("CONNECT version=1")).startswith("CONNECT_ACK ")
        self.heard[name].append((await client.ask(self.login(name.rstrip("2")))).encode())
        self.tasks[name] = asyncio.create_task(self.listen(name, client))

    def login(self, user: str) -> str:
        return f"AUTH token={plain_token(user)}" if self.auth else f"IDENTIFY username={user}"

    async def listen(self, name: str, client: Raw) -> None:
        while frame := await client.frame():
            self.heard[name].append(re.sub(rb"timestamp=\d+", b"timestamp=#", frame))
        self.heard[name].append(b"the end")

    async def forget(self, name: str) -> None:
        self.tasks.pop(name).cancel()
        with contextlib.suppress(ssl.SSLError):  # what was still on its way
            await self.clients.pop(name).gone()

    def ended(self, name: str) -> bool:
        return self.tasks[name].done()


async def same(ours: Side, theirs: Side, mark: bytes, asked: object) -> None:
    """Wait until every client has the answer to its mark, or the end, from both, and heard the same before it."""
    for side in (ours, theirs):
        for name, client in side.clients.items():
            if not side.ended(name):
                client.write(b"CLEAR id=%s channel=!nobody@localhost\n" % mark)
    answer = b"ERROR id=%s reason=CHANNEL_NOT_FOUND\n" % mark
    try:
        async with asyncio.timeout(10):
            for name in ours.clients:
                while True:
                    said = [sorted(one for one in side.heard[name] if one != answer) for side in (ours, theirs)]
                    done = [side.ended(name) or answer in side.heard[name] for side in (ours, theirs)]
                    if said[0] == said[1] and all(done):
                        break
                    await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"{asked}\n{name} heard from us {ours.heard[name]}\nfrom the original {theirs.heard[name]}")
    for name in ours.clients:
        ours.heard[name].clear()
        theirs.heard[name].clear()


async def converse(rng: random.Random, ours: Side, theirs: Side, names: list[str]) -> None:
    asked: list[tuple[str, bytes]] = []
    for step in range(STEPS):
        name = rng.choice(names)
        if name in ours.clients and (ours.ended(name) or theirs.ended(name)):
            await asyncio.gather(ours.tasks[name], theirs.tasks[name])
            await asyncio.gather(ours.forget(name), theirs.forget(name))
        if name not in ours.clients:
            asked.append((name, b"comes in"))
            await asyncio.gather(ours.enter(name), theirs.enter(name))
        else:
            data = request(rng, step + 1)
            asked.append((name, (spelt(rng, data) if rng.random() < 0.25 else data) + b"\n"))
            for side in (ours, theirs):
                side.clients[name].write(asked[-1][1])
        await same(ours, theirs, b"%d" % (1_000_000 + step), asked[-1])
    for side in (ours, theirs):
        for name in list(side.clients):
            await side.forget(name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("auth", [False, True], ids=["names", "logins"])
async def test_every_client_hears_the_same_from_both(tmp_path: Path, auth: bool, seed: int) -> None:
    server = ChannelServer(
        tmp_path / "ours", port=None, plain_port=0, limits=Limits(**SMALL), wire=WireSettings(**WIRE),
        modulator=PlainAuthenticator() if auth else None,
    )  # fmt: skip
    async with asyncio.timeout(10 * SECONDS), original(tmp_path, auth=auth, limits=LIMITS) as address, server:
        theirs = Side(address, tls=True, auth=auth)
        ours = Side(server.addresses["channels-plain"], tls=False, auth=auth)
        await converse(random.Random(seed), ours, theirs, ["ann", "bob", "eve", *["ann2"] * auth])

"""Whole conversations with a channel server, mutated, against the deciding parts alone: no socket, no disk.

Whatever a client sends: nothing raises, each line that goes back is one a client can read, and a link that ended says
no more.

    python fuzz/channel_conversations.py [--inputs N] [--seed N]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _run import main
from channel_frames import mutate
from penstock.channels import commands as c
from penstock.channels.core import ShardCore
from penstock.channels.ids import Nid
from penstock.channels.model import Limits
from penstock.channels.rules import paged
from penstock.channels.username import is_username
from penstock.channels.wire.cutter import Cutter, Fault, cut_client_run
from penstock.channels.wire.link import Ask, AskRun, ClientLink, LinkState, ListChannels, Login
from penstock.channels.wire.settings import WireSettings
from penstock.errors import Refused

CHANNELS = ["!a@localhost", "!b@localhost", "!a@far.io"]
LIMITS = Limits(max_channels=2, max_channels_per_client=2, max_clients_per_channel=3, max_payload_size=64)
SETTINGS = WireSettings(max_message_size=512, max_payload_size=64, rate_limit=4096, max_inflight_requests=3)


def request(rng: random.Random, number: int) -> bytes:
    """Return something a client may ask."""
    channel = rng.choice(CHANNELS)
    payload = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    return rng.choice([
        b"JOIN id=%d channel=%s\n", b"LEAVE id=%d channel=%s\n", b"DELETE id=%d channel=%s\n", b"MEMBERS id=%d channel=%s page=0\n",
        b"GET_CHAN_CONFIG id=%d channel=%s\n", b"SET_CHAN_CONFIG id=%d channel=%s max_clients=2\n",
        b"GET_CHAN_ACL id=%d channel=%s type=read\n", b"POP id=%d channel=%s\n", b"CHAN_SEQ id=%d channel=%s\n",
        b"SET_CHAN_ACL id=%d channel=%s action=add type=publish nids=ann@localhost\n", b"PONG id=%d x=%s\n",
        b"BROADCAST id=%%d channel=%%s length=%d\n%s\n" % (len(payload), payload.replace(b"%", b"%%")),
    ]) % (number, channel.encode())  # fmt: skip


class World:
    """Channels in memory, and two clients that hear each other."""

    def __init__(self) -> None:
        self.core = ShardCore("localhost", LIMITS, authenticated=False)
        self.links = [ClientLink(SETTINGS, LIMITS, now=0.0) for _ in range(2)]

    def carry_out(self, link: ClientLink, request: object) -> None:
        """Do what a link asks for, as the shell does."""
        match request:
            case Login(text, _) if is_username(text):
                nid = Nid(text, "localhost")
                if any(other.nid == nid for other in self.links):
                    link.name_in_use()
                else:
                    link.logged_in(nid, 1.0)
            case Login():
                link.fail("BAD_REQUEST", "invalid NID format")
            case AskRun(run, channel):
                assert link.nid is not None
                command = c.BroadcastMany(channel, link.nid, tuple(run.payloads), 1)
                try:
                    link.run_answered(run, self.decide(command, link))
                except Refused as exc:
                    for number in run.id_list():
                        link.refused(exc, number)
            case Ask(frame, command):
                try:
                    link.answered(frame, self.decide(command, link))
                except Refused as exc:
                    link.refused(exc, frame.id)
            case ListChannels(frame):
                assert link.nid is not None
                names = [f"!{handler}@localhost" for handler in self.core.memberships.of(link.nid)]
                link.answered(frame, paged(names, frame.fields["page"], frame.fields["page_size"], 20, 50))

    def decide(self, command: c.Command, source: ClientLink) -> object:
        """Decide, apply, tell the others."""
        decision = self.core.decide(command)
        assert not decision.steps  # nothing here is kept
        self.core.apply(decision)
        for event in decision.events:
            for link in self.links:
                if link is not source and link.nid in event.recipients and link.state is LinkState.READY:
                    link.deliver(event)
        return decision.answer


def run(inputs: int, seed: int) -> str | None:
    """Try so many conversations."""
    rng = random.Random(seed)
    ends = 0
    for _ in range(inputs):
        world = World()
        for turn in range(rng.randrange(2, 8)):
            link = rng.choice(world.links)
            data = b""
            if link.state is LinkState.CONNECTING:
                data = b"CONNECT version=1\nIDENTIFY username=%s\n" % (b"ann" if link is world.links[0] else b"bob")
            data += b"".join(request(rng, rng.randrange(1, 50)) for _ in range(rng.randrange(4)))
            if rng.random() < 0.4:
                data = mutate(rng, data or b"\n")
            over = link.state is LinkState.ENDED
            cut = rng.randrange(len(data) + 1)
            for part in (data[:cut], data[cut:]):
                link.feed(part, float(turn))
                while (found := link.next_request(float(turn), 1, bool)) is not None:
                    world.carry_out(link, found)
            if rng.random() < 0.1:
                link.tick(float(turn) + 1000)
            out = b"".join(link.take_output())
            assert not (over and out), out
            heard = Cutter(SETTINGS.max_message_size, 64, cut_client_run).feed(out)
            assert not any(isinstance(item, Fault) for item in heard), out
        ends += sum(link.state is LinkState.ENDED for link in world.links)
    assert ends or inputs < 100
    return None


if __name__ == "__main__":
    main(__doc__, run)

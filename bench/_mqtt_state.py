"""Makes the data directory that bench/mqtt_durable.py starts a broker on: many sessions, subscriptions, messages.

    python bench/_mqtt_state.py FOLDER SESSIONS SUBSCRIPTIONS_EACH QUEUED

Everything goes through the broker itself.  Each message is of its own and waits for one session.  It ends without
closing anything, as kill -9 does.
"""

from __future__ import annotations

import asyncio
import os
import sys

from penstock.kernel.mqtt import make_run
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Filter
from penstock.mqtt.session import NEVER, Session
from penstock.mqtt.state_open import KeptBroker


async def make(folder: str, sessions: int, each: int, queued: int) -> None:
    options = BrokerOptions(max_queued_messages=10_000_000, max_total_queued_bytes=1 << 40)
    kept = KeptBroker(folder, options, loop=asyncio.get_running_loop())
    broker = kept.broker
    for number in range(sessions):
        session = broker.sessions[f"device-{number}"] = Session(f"device-{number}", broker.options, broker.budget)
        session.expiry = NEVER
        broker.journal.session(session)
        for place in range(each):
            broker.subscribe(session, Filter(f"plant/{number}/{place}", 1), 0)
        if number % 1000 == 0:
            await kept.settle()
    for number in range(queued):
        broker.publish(make_run(b"plant/%d/0" % (number % sessions), [b"x" * 64], 1, False), None)
        if number % 100 == 0:
            kept.gate.end_turn()
            await asyncio.sleep(0)
    await kept.settle()
    while kept.checkpoints.running:
        await asyncio.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(make(sys.argv[1], *map(int, sys.argv[2:])))

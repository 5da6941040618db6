"""Does finding who gets a message depend on how many filters and topics there are?

Filters are spread as fleets spread them: one of each device, some with wildcards.  A million topics are looked up for
the first time (cold) and again (warm), then while subscriptions come and go.  The peer is the matcher of paho-mqtt.

    python bench/mqtt_routes.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from typing import Any

from paho.mqtt.matcher import MQTTMatcher

import _table
from penstock.mqtt.broker import Broker
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Filter
from penstock.mqtt.session import Session


def filters(count: int) -> list[str]:
    """A filter for each device, every tenth with a wildcard level, every hundredth for a whole site."""
    found = []
    for n in range(count):
        site, device = n % 1000, n // 1000
        if n % 100 == 0:
            found.append(f"site/{site}/+/{device}/#")
        elif n % 10 == 0:
            found.append(f"site/{site}/device/{device}/+")
        else:
            found.append(f"site/{site}/device/{device}/state")
    return found


def measure(count: int, topics: int) -> dict[str, Any]:
    wanted = filters(count)
    names = [f"site/{n % 1000}/device/{n // 1000}/state" for n in range(topics)]
    random.Random(1).shuffle(names)
    encoded = [name.encode() for name in names]
    broker = Broker()
    sessions = [Session(f"client-{n}", BrokerOptions(), broker.budget) for n in range(1000)]
    begin = time.process_time()
    for n, each in enumerate(wanted):
        broker.subscribe(sessions[n % 1000], Filter(each, 0, False, False, 0), 0)
    subscribed = time.process_time() - begin

    find = broker.routes.find
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    for name in encoded:
        find(name)
    cold = time.process_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    few = encoded[: min(topics, 50_000)]
    for name in few:
        find(name)
    begin = time.process_time()
    for name in few:
        find(name)
    warm = time.process_time() - begin
    begin = time.process_time()
    for n, name in enumerate(few):  # somebody comes or goes after every tenth message
        if n % 10 == 0:
            broker.subscribe(sessions[n % 1000], Filter(f"new/{n % 500}/#", 0, False, False, 0), 0)
        find(name)
    changing = time.process_time() - begin

    peer: Any = MQTTMatcher()
    for n, each in enumerate(wanted):
        peer[each] = n
    begin = time.process_time()
    for name in names[: len(few)]:
        list(peer.iter_match(name))
    its = time.process_time() - begin
    return {
        "filters": count, "topics": topics, "subscribe_us": subscribed / count * 1e6, "cold_us": cold / topics * 1e6,
        "warm_us": warm / len(few) * 1e6, "changing_us": changing / len(few) * 1e6, "paho_us": its / len(few) * 1e6,
        "cache_mib": grown / 1024,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [(100, 1000)] if options.quick else [(1_000, 1_000_000), (10_000, 1_000_000), (100_000, 1_000_000)]
    rows = [measure(*size) for size in sizes]
    if options.json:
        print(json.dumps(rows))
        return
    head = ["filters", "a subscription", "first time", "again", "while others subscribe", "paho's matcher"]
    names = ["subscribe_us", "cold_us", "warm_us", "changing_us", "paho_us"]
    print(f"{sizes[-1][1]:,} topics; processor time of one of them:\n")
    print(_table.markdown(head, [[f"{row['filters']:,}", *(f"{row[name]:.1f} µs" for name in names)] for row in rows]))


if __name__ == "__main__":
    main()

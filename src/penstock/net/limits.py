"""How many connections, how often, how much: counted in constant time, decided without a socket.

A refusal costs a look into two dicts, so a flood of connects is turned away before a TLS handshake is begun.
"""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import OptionsError

__all__ = ["TokenBucket", "ConnectionLimits", "Admission"]

KEPT_ADDRESSES: Final = 65_536
"""Addresses without a connection whose rate is remembered; past it the ones that have filled up again are dropped."""


class TokenBucket:
    """A token bucket: ``rate`` tokens a second flow in, up to ``burst``; what is taken beyond it has to be waited for.

    >>> from penstock.testing.clock import FakeClock
    >>> clock = FakeClock()
    >>> bucket = TokenBucket(rate=2.0, burst=3.0, clock=clock)
    >>> [bucket.take() for _ in range(4)]
    [0.0, 0.0, 0.0, 0.5]
    >>> clock.pass_(1.0); bucket.try_take(), bucket.try_take()
    (True, False)
    """

    __slots__ = ("_clock", "_last", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, clock: Clock = SYSTEM_CLOCK) -> None:
        if rate <= 0 or burst <= 0:
            raise OptionsError(f"a quota of {rate:g} a second with a burst of {burst:g} lets nothing through")
        self.rate, self.burst = rate, burst
        self._clock, self._tokens, self._last = clock, burst, clock.monotonic()

    def take(self, amount: float = 1.0) -> float:
        """Take ``amount`` in any case and return the seconds to wait until it is paid for; 0.0 where it was there."""
        self._tokens = self._filled() - amount
        return 0.0 if self._tokens >= 0 else -self._tokens / self.rate

    def try_take(self, amount: float = 1.0) -> bool:
        """Take ``amount`` if it is there, else nothing."""
        tokens = self._filled()
        self._tokens = tokens - amount if tokens >= amount else tokens
        return tokens >= amount

    @property
    def full(self) -> bool:
        """Whether nothing is missing: such a bucket may be forgotten and made again."""
        return self._filled() >= self.burst

    def _filled(self) -> float:
        now = self._clock.monotonic()
        tokens = min(self.burst, self._tokens + (now - self._last) * self.rate)
        self._last, self._tokens = now, tokens
        return tokens


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server lets in.  An address is an IPv4 address or an IPv6 /64; unix sockets are one address.

    >>> ConnectionLimits(max_connections=0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: max_connections=0: must be at least 1
    """

    max_connections: int = 100_000
    """Connections of all listeners together, those that still shake hands included."""

    max_per_address: int | None = None
    """Connections of one address; None where a whole fleet may sit behind one."""

    connects_per_second: float | None = None
    """New connections a second in all, with a burst of as many; None does not count."""

    connects_per_second_per_address: float | None = None
    """New connections a second from one address."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            least = 1 if field.startswith("max") else 0
            if value is not None and (value < least or value == 0):
                raise OptionsError(f"{field}={value}: must be {'at least 1' if least else 'above 0'}")


class Admission:
    """Says who may come in, and remembers who is.

    >>> door = Admission(ConnectionLimits(max_connections=2, max_per_address=1))
    >>> door.enter("10.0.0.1"), door.enter("10.0.0.1")
    (None, '1 connections of 10.0.0.1 are open, the limit')
    >>> door.leave("10.0.0.1"); door.enter("10.0.0.1") is None
    True
    """

    def __init__(self, limits: ConnectionLimits | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.refused = 0
        self.total = 0
        self._clock = clock
        self._of_address: dict[str, int] = {}
        self.use(limits or ConnectionLimits())

    def use(self, limits: ConnectionLimits) -> None:
        """Go by these limits from here on; who is in stays."""
        self.limits = limits
        self._buckets: dict[str, TokenBucket] = {}
        rate = limits.connects_per_second
        self._all = TokenBucket(rate, max(rate, 1.0), self._clock) if rate is not None else None

    def enter(self, address: str) -> str | None:
        """Count a connection of ``address`` in, or return the sentence that says why not."""
        reason = self._reason_against(address)
        if reason is not None:
            self.refused += 1
            return reason
        self.total += 1
        if self.limits.max_per_address is not None:
            network = network_of(address)
            self._of_address[network] = self._of_address.get(network, 0) + 1
        return None

    def leave(self, address: str) -> None:
        """Count one out that ``enter`` let in."""
        self.total -= 1
        if self.limits.max_per_address is not None:
            network = network_of(address)
            left = self._of_address[network] - 1
            if left:
                self._of_address[network] = left
            else:
                del self._of_address[network]

    def _reason_against(self, address: str) -> str | None:
        limits = self.limits
        if self.total >= limits.max_connections:
            return f"{limits.max_connections} connections are open, the limit"
        if limits.max_per_address is not None:
            network = network_of(address)
            if self._of_address.get(network, 0) >= limits.max_per_address:
                return f"{limits.max_per_address} connections of {network} are open, the limit"
        if limits.connects_per_second_per_address is not None and not self._bucket(network_of(address)).try_take():
            return f"{network_of(address)} connects more than {limits.connects_per_second_per_address:g} times a second"
        if self._all is not None and not self._all.try_take():
            return f"more than {limits.connects_per_second:g} connects a second"
        return None

    def _bucket(self, network: str) -> TokenBucket:
        bucket = self._buckets.get(network)
        if bucket is None:
            if len(self._buckets) >= KEPT_ADDRESSES:
                self._buckets = {name: kept for name, kept in self._buckets.items() if not kept.full}
                if len(self._buckets) >= KEPT_ADDRESSES:  # a flood from everywhere: the total rate has to hold it
                    self._buckets.clear()
            rate = self.limits.connects_per_second_per_address
            assert rate is not None
            bucket = self._buckets[network] = TokenBucket(rate, max(rate, 1.0), self._clock)
        return bucket


def network_of(address: str) -> str:
    """Return what is counted as one: the address itself, for IPv6 its /64, because a customer has all of that.

    >>> network_of("10.0.0.7"), network_of("2001:db8::7"), network_of("::ffff:10.0.0.7"), network_of("unix")
    ('10.0.0.7', '2001:db8::/64', '10.0.0.7', 'unix')
    """
    if ":" not in address:
        return address
    try:
        ip = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(ip) >> 64 << 64)}/64"

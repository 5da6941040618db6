"""What hangs on a broker: its taps, feeds, bridges and mirrors, begun and ended with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionsError, PenstockError
from penstock.lifecycle import Part, State
from penstock.mqtt.bridge import Bridge, BridgeSpec
from penstock.mqtt.feed import Feed, FeedSpec
from penstock.mqtt.mirror import Mirror, MirrorSpec
from penstock.mqtt.tap import Tap
from penstock.mqtt.tapspec import TapSpec

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.server import ServerOptions

__all__ = ["Attached", "needs_gate"]


def needs_gate(options: ServerOptions) -> bool:
    """Whether acknowledgements may have to wait for something that hangs on the broker."""
    return bool(options.taps or options.bridges)


def merged(taps: tuple[TapSpec, ...]) -> list[TapSpec]:
    """Return taps with one entry for each path: a log has one writer, and a message is in it once.

    >>> [tap.filter for tap in merged((TapSpec.parse("a/#=x"), TapSpec.parse("b/#=y"), TapSpec.parse("c=x")))]
    [('a/#', 'c'), 'b/#']
    """
    import msgspec

    found: dict[str, TapSpec] = {}
    for tap in taps:
        path = os.path.normpath(tap.path)
        first = found.get(path)
        if first is None:
            found[path] = tap
        elif msgspec.structs.replace(first, filter="#") != msgspec.structs.replace(tap, filter="#", path=first.path):
            raise OptionsError(f"two taps write {tap.path} and do not agree how")
        else:
            found[path] = msgspec.structs.replace(first, filter=(*first.filters, *tap.filters))
    return list(found.values())


AttachedSpec = TapSpec | MirrorSpec | BridgeSpec | FeedSpec


def _specs_of(options: ServerOptions) -> list[AttachedSpec]:
    """Return what options name, in the order in which it begins."""
    return [*merged(options.taps), *options.mirrors, *options.bridges, *options.feeds]


def _check_names(parts: list[Part]) -> None:
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise OptionsError(f"{name}: two of them; give one another name")


class Attached:
    """The parts of one broker.  Taps stand before anybody is let in; the others follow."""

    def __init__(self, options: ServerOptions, broker: Broker, data: str | None) -> None:
        if data is None and (options.bridges or options.mirrors):
            raise OptionsError("bridges and mirrors need a data directory: for what waits, and what was agreed on")
        self._broker, self._home = broker, data or "."
        self._specs = _specs_of(options)
        self.parts: list[Part] = [self._make(spec) for spec in self._specs]
        _check_names(self.parts)

    def _make(self, spec: AttachedSpec) -> Part:
        if isinstance(spec, TapSpec):
            return Tap(spec, self._broker)
        if isinstance(spec, MirrorSpec):
            return Mirror(spec, self._broker, os.path.join(self._home, "mirrors"))
        if isinstance(spec, BridgeSpec):
            return Bridge(spec, self._broker, os.path.join(self._home, "bridges"))
        return Feed(spec, broker=self._broker)

    async def change(self, options: ServerOptions, seconds: float) -> str:
        """Have what other options name, all of it or nothing; return why nothing was changed.

        What stays the same is not touched.  The others are ended before what takes their place begins: they may share
        a log.  If one of these cannot begin, those that were there are begun again.
        """
        try:
            wanted = _specs_of(options)
            there = {self._specs.index(spec) for spec in wanted if spec in self._specs}
            made = [self.parts[self._specs.index(spec)] if spec in self._specs else self._make(spec) for spec in wanted]
            _check_names(made)
        except PenstockError as exc:
            return str(exc)
        leaving = [number for number in range(len(self._specs)) if number not in there]
        begun: list[Part] = []
        try:
            await self._end([self.parts[number] for number in leaving], seconds)
            for spec, part in zip(wanted, made, strict=True):
                if spec not in self._specs:
                    begun.append(part)
                    await part.start()
        except (PenstockError, OSError) as exc:
            await self._end(begun, 0.0)
            for number in leaving:
                self.parts[number] = self._make(self._specs[number])
                await self.parts[number].start()
            return f"{begun[-1].name if begun else 'taps and feeds'}: {exc}"
        self._specs, self.parts = wanted, made
        return ""

    async def _end(self, parts: list[Part], seconds: float) -> None:
        for part in reversed(parts):
            await part.drain(seconds)
            await part.stop()

    async def start(self) -> None:
        """Start all or none."""
        try:
            for part in self.parts:
                await part.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, seconds: float) -> None:
        """Let each finish, those that bring messages first."""
        for part in reversed(self.parts):
            await part.drain(seconds)

    async def stop(self) -> None:
        """End all."""
        for part in reversed(self.parts):
            await part.stop()

    @property
    def trouble(self) -> str:
        """Why one of them is not as it should be; empty when all are."""
        for part in self.parts:
            health = part.health()
            if health.state in (State.DEGRADED, State.FAILED):
                return f"{part.name}: {health.reason}"
        return ""

    def describe(self) -> dict[str, Any]:
        """Return what each has to say."""
        return {part.name: {"state": str(part.health().state), **part.describe()} for part in self.parts}

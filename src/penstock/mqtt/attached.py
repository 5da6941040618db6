"""What hangs on a broker: its taps, feeds, bridges and mirrors, begun and ended with it.

One that fails is made anew after a pause that grows; the broker and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

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

_log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = (1.0, 60.0)
"""How long one that failed is left alone: the first time, and at the most."""


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


class KeptPart:
    """A part that is made anew when it fails."""

    def __init__(self, make: Callable[[], Part]) -> None:
        self._make, self.part = make, make()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.part.start()
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of {self.part.name}")

    async def _keep(self) -> None:
        pause, longest = AGAIN_SECONDS
        begun = True
        while True:
            try:
                if not begun:
                    await self.part.start()
                await self.part.wait()
                return
            except Exception as exc:  # noqa: BLE001 - whatever it is, people are told and it is tried again
                _log.error("%s: %s; it begins again in %g s", self.part.name, exc or type(exc).__name__, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            await self.part.stop()
            self.part, begun = self._make(), False

    async def stop(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await self.part.stop()


class Attached:
    """The parts of one broker.  Taps stand before anybody is let in; the others follow."""

    def __init__(self, options: ServerOptions, broker: Broker, data: str | None) -> None:
        if data is None and (options.bridges or options.mirrors):
            raise OptionsError("bridges and mirrors need a data directory: for what waits, and what was agreed on")
        self._broker, self._home = broker, data or "."
        self._specs = _specs_of(options)
        self._kept = [self._keep(spec) for spec in self._specs]
        _check_names(self.parts)

    @property
    def parts(self) -> list[Part]:
        """What hangs there now, in the order in which it began."""
        return [kept.part for kept in self._kept]

    def _keep(self, spec: AttachedSpec) -> KeptPart:
        return KeptPart(lambda: self._make(spec))

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
            made = [self._kept[self._specs.index(spec)] if spec in self._specs else self._keep(spec) for spec in wanted]
            _check_names([kept.part for kept in made])
        except PenstockError as exc:
            return str(exc)
        leaving = [number for number in range(len(self._specs)) if number not in there]
        begun: list[KeptPart] = []
        try:
            await self._end([self._kept[number] for number in leaving], seconds)
            for spec, kept in zip(wanted, made, strict=True):
                if spec not in self._specs:
                    begun.append(kept)
                    await kept.start()
        except (PenstockError, OSError) as exc:
            await self._end(begun, 0.0)
            for number in leaving:
                self._kept[number] = self._keep(self._specs[number])
                await self._kept[number].start()
            return f"{begun[-1].part.name if begun else 'taps and feeds'}: {exc}"
        self._specs, self._kept = wanted, made
        return ""

    async def _end(self, leaving: list[KeptPart], seconds: float) -> None:
        for kept in reversed(leaving):
            await kept.part.drain(seconds)
            await kept.stop()

    async def start(self) -> None:
        """Start all or none."""
        try:
            for kept in self._kept:
                await kept.start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, seconds: float) -> None:
        """Let each finish, those that bring messages first."""
        for part in reversed(self.parts):
            await part.drain(seconds)

    async def stop(self) -> None:
        """End all."""
        for kept in reversed(self._kept):
            await kept.stop()

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

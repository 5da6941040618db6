"""Modulators: an application's own word on who may log in, join and broadcast, and what with.

A modulator is any object with some of these methods, each sync or async; what it lacks is not asked:

    authenticate(token)                      the username, a Challenge, or None for no
    authorize_join(nid, channel)             whether this member may join
    authorize_broadcast(nid, channel)        whether this member may broadcast
    transform(nid, channel, payload)         the payload to store and deliver, or None to refuse it
    on_event(event)                          told of each event before the members are
    direct(nid, payload)                     a payload for the modulator alone: whether it is taken

Async methods run on the event loop and must not block it; sync ones run in threads of their own.  One that raises,
takes too long or returns nonsense is an answer to the client it concerns, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire.frames import BadLine, decode_line, encode_frame
from penstock.disk import Threads
from penstock.errors import OptionsError, PenstockError, Timeout

__all__ = ["Challenge", "Moderation", "ModulatorFailed", "load_modulator", "reload_modulator"]

_log = logging.getLogger(__name__)

METHODS: Final = ("authenticate", "authorize_join", "authorize_broadcast", "transform", "on_event", "direct")
MOMENT: Final = 0.05
"""Seconds that a sync method spends on a run before the others have their turn."""
THREADS: Final = 8
"""Sync calls of one modulator at a time; while all of them hang the next ones time out."""


class Challenge(msgspec.Struct, frozen=True):
    """What a client is asked before it is let in: it answers with another token.

    >>> Challenge("salt42").text
    'salt42'
    """

    text: str


class ModulatorFailed(PenstockError):
    """A modulator raised, hung or lied; ``reason`` is the word the client is told.

    >>> str(ModulatorFailed("transform", "it took longer than 5 s"))
    'the modulator failed in transform: it took longer than 5 s'
    """

    def __init__(self, method: str, why: str, reason: str = "INTERNAL_SERVER_ERROR") -> None:
        super().__init__(method, why, reason)
        self.method, self.why, self.reason = method, why, reason

    def __str__(self) -> str:
        return f"the modulator failed in {self.method}: {self.why}"


class Moderation:
    """A modulator in use: calls with a time limit, answers checked.

    >>> class Door:
    ...     def authenticate(self, token): return token if token != "eve" else None
    >>> async def demo():
    ...     moderation = Moderation(Door(), 5.0)
    ...     return await moderation.authenticate("ann"), await moderation.authenticate("eve"), moderation.has("direct")
    >>> asyncio.run(demo())
    ('ann', None, False)
    """

    def __init__(self, modulator: object, timeout: float) -> None:
        self.modulator, self.timeout = modulator, timeout
        self.protocol: str = str(getattr(modulator, "protocol", None) or type(modulator).__name__)
        self._threads = Threads(THREADS, "penstock-modulator")
        self._methods: dict[str, Callable[..., Any]] = {}
        for name in METHODS:
            method = getattr(modulator, name, None)
            if callable(method) and self._offers(modulator, name):
                self._methods[name] = method
        if not _can_be_said(self.protocol):
            raise OptionsError(f"{type(modulator).__name__} is no modulator: {self.protocol!r:.80} is no protocol")
        if not self._methods:
            raise OptionsError(f"{type(modulator).__name__} is no modulator: it has none of {', '.join(METHODS)}")

    @staticmethod
    def _offers(modulator: object, name: str) -> bool:
        """Say whether it can do that: one that learns so elsewhere says it in ``operations``."""
        return name in getattr(modulator, "operations", METHODS)

    def has(self, method: str) -> bool:
        """Say whether the modulator wants to be asked."""
        return method in self._methods

    @property
    def sees_broadcasts(self) -> bool:
        """Whether a broadcast is shown to it."""
        return "transform" in self._methods or "authorize_broadcast" in self._methods

    def close(self) -> None:
        """Let go of the threads; those that hang are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- What the server asks

    async def authenticate(self, token: str) -> str | Challenge | None:
        """Return the username behind a token, what to ask the client next, or None."""
        found = await self._call("authenticate", token)
        if found is None or found is False:
            return None
        if isinstance(found, str) and _can_be_said(found):
            return found
        if isinstance(found, Challenge) and _can_be_said(found.text):
            return found
        raise ModulatorFailed("authenticate", f"it returned {found!r:.80}, not a username")

    async def may_join(self, nid: Nid, channel: ChannelId) -> bool:
        """Say whether a member may join."""
        return not self.has("authorize_join") or bool(await self._call("authorize_join", nid, channel))

    async def may_broadcast(self, nid: Nid, channel: ChannelId) -> bool:
        """Say whether a member may broadcast."""
        return not self.has("authorize_broadcast") or bool(await self._call("authorize_broadcast", nid, channel))

    async def transform(
        self, nid: Nid, channel: ChannelId, payloads: Sequence[bytes]
    ) -> tuple[list[bytes | None], ModulatorFailed | None]:
        """Return what to store in place of each payload, None where one is refused, up to where it failed."""
        if not self.has("transform"):
            return list(payloads), None
        found: list[Any] = []
        failed: ModulatorFailed | None = None
        many = getattr(self.modulator, "transform_many", None)
        try:
            if many is not None:
                found = list(await self._limited("transform", many(nid, channel, payloads)))
            elif inspect.iscoroutinefunction(self._methods["transform"]):
                for payload in payloads:
                    found.append(await self._call("transform", nid, channel, payload))
            else:
                while len(found) < len(payloads):
                    await self._some_in_thread(nid, channel, payloads, found)
        except ModulatorFailed as exc:
            failed = exc
        for index, payload in enumerate(found):
            if isinstance(payload, ModulatorFailed):
                return found[:index], payload
            if payload is not None and (not isinstance(payload, bytes) or not payload):
                return found[:index], ModulatorFailed("transform", "it returned no bytes")
            if payload is not None and type(payload) is not bytes:
                found[index] = bytes(payload)
        return list(found), failed

    async def _some_in_thread(self, nid: Nid, channel: ChannelId, payloads: Sequence[bytes], found: list[Any]) -> None:
        """Add to ``found`` what a sync method says, for a moment: each call has a time limit, not all together."""
        method, over = self._methods["transform"], False

        def work() -> Any:
            until = time.monotonic() + MOMENT
            while len(found) < len(payloads) and time.monotonic() < until:
                said = method(nid, channel, payloads[len(found)])
                if over:
                    return None
                if inspect.isawaitable(said):
                    return said
                found.append(said)
            return None

        try:
            said = await self._in_thread("transform", work)
        finally:
            over = True
        if said is not None:
            found.append(await self._limited("transform", said))

    async def tell(self, event: c.Event) -> None:
        """Tell it of an event; for ChannelManager.event_gate."""
        await self._call("on_event", event)

    async def direct(self, nid: Nid, payload: bytes) -> bool:
        """Hand it a payload; say whether it was taken."""
        return bool(await self._call("direct", nid, payload))

    # --- With a time limit

    async def _call(self, name: str, *args: Any) -> Any:
        method = self._methods[name]
        if inspect.iscoroutinefunction(method):
            return await self._limited(name, method(*args))
        found = await self._in_thread(name, lambda: method(*args))
        return await self._limited(name, found) if inspect.isawaitable(found) else found

    async def _in_thread(self, name: str, work: Callable[[], Any]) -> Any:
        def answer() -> Any:
            try:
                return work()
            except StopIteration as exc:  # no future can carry it
                raise RuntimeError(repr(exc)) from exc

        return await self._limited(name, asyncio.get_running_loop().run_in_executor(self._threads, answer))

    async def _limited(self, name: str, coming: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                return await coming
        except ModulatorFailed:
            raise
        except (TimeoutError, Timeout):
            raise ModulatorFailed(name, f"it took longer than {self.timeout:g} s") from None
        except BaseException as exc:  # also sys.exit and a cancellation of its own: neither is the server's
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            _log.warning("the modulator failed in %s: %r", name, exc)
            raise ModulatorFailed(name, repr(exc)) from exc


def _can_be_said(text: Any) -> bool:
    """Whether a text reaches a client as it is: not empty, no line end, and a quote can be put around it."""
    if not isinstance(text, str) or not text or "\n" in text:
        return False
    try:
        said: str = decode_line(encode_frame("AUTH_ACK", {"challenge": text})[:-1]).fields["challenge"]
    except (BadLine, PenstockError, UnicodeError):
        return False
    return said == text


def load_modulator(text: str) -> object:
    """Return a modulator of the class that ``module:Class`` names.

    >>> load_modulator("penstock.channels.wire.modulator:Nothing")
    Traceback (most recent call last):
    penstock.errors.OptionsError: modulator penstock.channels.wire.modulator:Nothing: the module has no Nothing
    """
    module_name, colon, class_name = text.partition(":")
    if not colon:
        raise OptionsError(f"modulator {text}: write it as module:Class")
    with _naming(text), _without_bytecode():
        module = importlib.import_module(module_name)
    made = getattr(module, class_name, None)
    if made is None:
        raise OptionsError(f"modulator {text}: the module has no {class_name}")
    try:
        return made() if inspect.isclass(made) else made
    except (Exception, SystemExit) as exc:
        raise OptionsError(f"modulator {text}: it cannot be made: {exc}") from exc


def reload_modulator(text: str) -> object:
    """Return a new modulator of a class that was loaded before, of its module as it is now."""
    with _naming(text), _without_bytecode():
        importlib.reload(sys.modules[text.partition(":")[0]])
    return load_modulator(text)


@contextlib.contextmanager
def _naming(text: str) -> Iterator[None]:
    """Say in one line what is wrong with a module, and where: it is anyone's code, and half written perhaps."""
    try:
        yield
    except (ImportError, SyntaxError) as exc:
        raise OptionsError(f"modulator {text}: {exc}") from exc
    except (Exception, SystemExit) as exc:
        at = traceback.extract_tb(exc.__traceback__)[-1]
        raise OptionsError(f"modulator {text}: {exc!r} ({at.filename}, line {at.lineno})") from exc


@contextlib.contextmanager
def _without_bytecode() -> Iterator[None]:
    """Import without leaving bytecode: a module that is changed within the second would be taken from there again."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before

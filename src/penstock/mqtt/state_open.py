"""A broker with what it keeps: opened, restored, checked on the way, and closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Disk, disk_for
from penstock.disk.doors import refuse_foreign
from penstock.errors import OptionsError, PenstockError
from penstock.mqtt.broker import Broker
from penstock.mqtt.gate import Loop, TurnGate
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.state import StateJournal
from penstock.mqtt.state_checkpoint import Checkpoints
from penstock.mqtt.state_log import StateLog
from penstock.mqtt.state_options import PersistenceOptions
from penstock.mqtt.state_reserve import Reserve
from penstock.mqtt.state_restore import Restore, facts, open_store
from penstock.mqtt.state_time import OwnTime
from penstock.types import Problem

__all__ = ["KeptBroker", "own_time"]

_log = logging.getLogger(__name__)

RESERVE: Final = "penstock-reserve"
RESTORING: Final = "penstock-restoring"
"""There while a backup is put back: what is beside it is not all."""


class KeptBroker:
    """A broker whose state is in a folder.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> loop = asyncio.new_event_loop()
    >>> kept = KeptBroker(folder.name, loop=loop)
    >>> kept.broker.publish_message("a/b", b"on", retain=True)
    >>> kept.close()
    >>> kept = KeptBroker(folder.name, loop=loop)
    >>> kept.broker.retained.get(b"a/b").payload(), kept.facts["retained"]
    (b'on', 1)
    >>> kept.close(); loop.close(); folder.cleanup()
    """

    def __init__(
        self,
        folder: str,
        options: BrokerOptions | None = None,
        persistence: PersistenceOptions | None = None,
        *,
        loop: Loop,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
        **parts: Any,
    ) -> None:
        began = time.monotonic()
        self.folder, self.options = folder, persistence or PersistenceOptions()
        disk = self._disk = disk or disk_for(folder)
        refuse_foreign(disk, folder, "data directory of a broker")
        disk.make_folder(folder)
        if disk.stat(os.path.join(folder, RESTORING)) is not None:
            raise OptionsError(f"{folder}: a backup was being put back here, and that did not end; put it back again")
        reserve = Reserve(disk, os.path.join(folder, RESERVE), self.options.reserve_bytes)
        device = self.options.sync != "none"
        log = reserve.with_room(lambda: StateLog(disk, os.path.join(folder, "journal"), device=device))
        self.problems: list[Problem] = log.problems
        try:
            store, problems = reserve.with_room(lambda: open_store(disk, folder))
        except BaseException:
            log.close()
            raise
        self.problems += problems
        collects = gc.isenabled()
        try:
            self._own = own = own_time(log, clock, disk)
            self.gate = TurnGate(loop)
            self.journal = journal = StateJournal(log, own, clock, self.options, reserve)
            journal.gate = self.gate
            self.gate.steps.append(journal)
            self.broker = Broker(options, clock=clock, journal=journal, gate=self.gate, **parts)
            restore = Restore(self.broker, journal, log, store)
            gc.disable()  # all of it stays: looking through it again and again would take most of the time
            restore.read()
            start = restore.end
            reserve.with_room(lambda: log.begin(start, own_ns=own.now_ns(), monotonic_ns=own.monotonic_ns()))
            self.checkpoints = journal.checkpoints = Checkpoints(
                journal, self.broker, store, loop, lambda: open_store(disk, folder)[0]
            )
            restore.into_broker()
            self.gate.end_turn()
            journal.sync()
            if device:
                reserve.with_room(log.mark)
            reserve.hold()
            if collects:
                gc.freeze()  # nor is it looked through later, until the broker is closed
        except BaseException:
            store.close()
            log.close()
            raise
        finally:
            if collects:
                gc.enable()
        self.problems += restore.problems
        self.facts = facts(restore, time.monotonic() - began)

    async def settle(self, seconds: float = 5.0) -> None:
        """Return when everything that waits at the gate has left, or after some time."""
        self.gate.end_turn()
        until = time.monotonic() + seconds
        while self.gate.busy and time.monotonic() < until:
            await asyncio.sleep(0.002)

    def describe(self) -> dict[str, Any]:
        """Return what there is to say about what is kept."""
        log = self.journal.log
        return {
            "folder": self.folder,
            "sync": self.options.sync,
            "trouble": self.journal.full or self.gate.trouble or self.checkpoints.trouble or None,
            "turns": self.journal.turns,
            "written_bytes": log.written,
            "undurable_bytes": log.end - log.synced if self.options.sync != "none" else None,
            "segments": log.files,
            "checkpoints": self.checkpoints.count,
            "problems": [str(problem) for problem in self.problems],
            "restored": self.facts,
        }

    def close(self) -> None:
        """Write what is left, the store as well so that the next start is quick, and let go."""
        try:
            self.gate.end_turn()
            if not self.gate.trouble:
                self.checkpoints.finish()
        except (OSError, PenstockError) as exc:
            _log.error("the store is not up to date, the next start reads more of the journal: %s", exc)
        finally:
            self.gate.close()
            try:
                self.checkpoints.close()
            finally:
                self.journal.close()
                gc.unfreeze()


def own_time(log: StateLog, clock: Clock, disk: Disk) -> OwnTime:
    """Return the broker's own time as it goes on after what is in the journal."""
    found = log.last_time()
    if found is None:
        return OwnTime(clock, 1)
    last, segment = found
    return OwnTime.resumed(clock, last, segment.boot, segment.own_ns, segment.monotonic_ns, disk.boot_id())

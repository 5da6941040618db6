"""How messages come into a broker from within its process: feeds, bridges, mirrors.

They go the way of a client's: through the gate, so ``publish`` returns when the broker has kept them and every tap that
is waited for has them too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.errors import RetryError
from penstock.kernel.mqtt import Run
from penstock.mqtt.reasons import Reason

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.gate import Answers

__all__ = ["Inlet"]


class Inlet:
    """One source of messages; ``origin`` is what taps know it by.

    >>> from penstock.kernel.mqtt import make_run
    >>> from penstock.mqtt.broker import Broker
    >>> broker = Broker()
    >>> asyncio.run(Inlet(broker, "feed:alerts").publish([make_run(b"a/b", [b"on"], 1, True)]))
    >>> len(broker.retained)
    1
    """

    def __init__(self, broker: Broker, name: str, origin: Any = None) -> None:
        self.broker, self.name = broker, name
        self.origin = origin or self
        self._waiting: list[asyncio.Future[None]] = []
        self._answers = self._new_answers()

    def _new_answers(self) -> Answers:
        answers = self.broker.gate.answers(self)  # type: ignore[arg-type]  # it takes the part of a connection
        answers.unkept = self._unkept
        return answers

    async def publish(self, runs: list[Run]) -> None:
        """Publish runs in order; return when they are kept.  RetryError where they could not be."""
        broker = self.broker
        if broker.journal.full and any(run.qos or run.retain for run in runs):
            raise RetryError(f"{self.name}: {broker.journal.full}")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        refused: list[int] = []
        self._waiting.append(done)
        for run in runs:
            if run.expiry >= 0:
                run.deadline = broker.clock.monotonic() + run.expiry
            broker.counts.publish_received += run.count
            broker.counts.publish_bytes_received += run.payload_bytes
            broker.publish(run, None, acknowledged=True, origin=self.origin)
            self._answers.acknowledge(b"", refused.append)

        def came() -> None:
            if done in self._waiting:
                self._waiting.remove(done)
            if done.done():
                return
            if refused:
                done.set_exception(RetryError(f"{self.name}: {Reason(refused[0]).name}"))
            else:
                done.set_result(None)

        self._answers.call(came)
        await done

    def _unkept(self) -> None:
        """Tell that what was published could not be written."""
        waiting, self._waiting = self._waiting, []
        self._answers = self._new_answers()
        for done in waiting:
            if not done.done():
                done.set_exception(RetryError(f"{self.name}: the broker could not keep it"))

    # --- What a gate asks of a connection

    def write(self, data: bytes | memoryview) -> None:
        """Take an acknowledgement."""

    def close(self, reason: str = "") -> None:
        """Stay."""

    def abort(self, reason: str) -> None:  # noqa: ARG002
        """Have everything published again that waits: an answer could not be given."""
        self._unkept()

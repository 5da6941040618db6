"""What a tap is told: a table ``[[taps]]`` of a configuration, or ``FILTER=PATH`` of the command line."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Literal

import msgspec

from penstock.errors import OptionsError
from penstock.log.options import SyncMode, check_sync
from penstock.mqtt.places import TapPlace
from penstock.mqtt.topics import is_filter

__all__ = ["TapSpec"]


class TapSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tap, as a table ``[[taps]]`` of a configuration says it.

    >>> TapSpec.parse("plant/#=data/readings").path
    'data/readings'
    >>> TapSpec(filter="plant/#", path="data/readings", on_failure="wait")
    Traceback (most recent call last):
    penstock.errors.OptionsError: on_failure='wait': must be one of block, refuse, drop
    """

    filter: str | tuple[str, ...]
    """One or several; a message that matches more than one is written once."""
    path: str
    """The log; with ``{client}`` or ``{1}``, ``{2}``, … (levels of the topic) a log for each."""
    name: str = ""
    """The path unless given."""
    format: Literal["xchannel", "filechannel", "messagelog"] | None = None
    """Of a log that is not there yet; xchannel unless said."""
    ack: Literal["tap", "broker"] = "tap"
    """``tap``: QoS 1 and 2 are acknowledged when the log has them; ``broker``: without a look at this tap."""
    on_failure: Literal["block", "refuse", "drop"] = "block"
    """When the log cannot be written: hold that publisher until it can, refuse (0x97, or closed in 3.1.1), or drop and
    count.  A QoS 2 message is never held but refused: a kill meanwhile could lose it."""
    sync: SyncMode = "none"
    """``none`` and ``interval`` survive the death of the process; ``always``: acknowledgements wait for the disk."""
    max_channels: int = 1000
    """Channels of a template; what would need one more is treated as ``on_failure`` says."""
    max_open: int = 64
    """Channels of a template that are open at once."""
    max_backlog_bytes: int = 64 << 20
    """What may wait for a log that cannot be written; beyond it is refused."""
    options: dict[str, Any] = {}
    """Further options of the format: ``roll_bytes``, ``keep_bytes``, ``max_messages``, …"""

    def __post_init__(self) -> None:
        for name, known in (("ack", ("tap", "broker")), ("on_failure", ("block", "refuse", "drop"))):
            if getattr(self, name) not in known:
                raise OptionsError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")
        check_sync(self.sync, 1.0)
        try:
            TapPlace(self.path)
        except OptionsError as exc:
            raise OptionsError(f"path: {exc}") from None
        for each in self.filters:
            if not is_filter(each):
                raise OptionsError(f"filter={each!r}: is no topic filter")
        self._check_options()
        for name in ("max_channels", "max_open"):
            if getattr(self, name) < 1:
                raise OptionsError(f"{name}={getattr(self, name)}: must be at least 1")

    def _check_options(self) -> None:
        """Refuse an option that the format does not have, or none does where the format is what is there."""
        if not self.options:
            return
        from penstock.log.filechannel import ChannelOptions
        from penstock.log.messagelog import MessageLogOptions
        from penstock.log.xchannel import WriterOptions

        kinds = {"xchannel": WriterOptions, "filechannel": ChannelOptions, "messagelog": MessageLogOptions}
        used = kinds.values() if self.format is None else [kinds[self.format]]
        known = sorted({field.name for kind in used for field in dataclasses.fields(kind)})
        for name in self.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise OptionsError(
                    f"options: there is no option {name}; "
                    + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
                )

    @property
    def filters(self) -> tuple[str, ...]:
        """All filters."""
        return (self.filter,) if isinstance(self.filter, str) else self.filter

    @classmethod
    def parse(cls, text: str) -> TapSpec:
        """Return the tap of ``FILTER=PATH``, as the command line has it."""
        wanted, sign, path = text.partition("=")
        if not sign or not path:
            raise OptionsError(f"{text!r}: a tap is FILTER=PATH, such as 'plant/#=data/readings'")
        return cls(filter=wanted, path=path)

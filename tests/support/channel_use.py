"""What tests of channels share: people, a persistent channel, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels import ChannelManager
from penstock.errors import Refused

ANN, BOB, CAT, EVE = "ann@localhost", "bob@localhost", "cat@localhost", "eve@localhost"


async def persistent(manager: ChannelManager, handler: str = "ops", *members: str, **settings: Any) -> Any:
    channel = manager.channel(handler)
    for member in members or (ANN,):
        await channel.join(member)
    await channel.configure((members or (ANN,))[0], persist=True, **settings)
    return channel


def refused(reason: str, detail: str = "") -> Any:
    return pytest.raises(Refused, match=f"^{reason}" + (f".*{detail}" if detail else ""))


async def payloads(channel: Any, *args: Any, who: str = ANN) -> list[bytes]:
    return [entry.payload for entry in await channel.history(who, *args)]

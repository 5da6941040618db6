"""A manager on a folder, and how to restart it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import ChannelManager, ManagerOptions


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[ChannelManager]]]:
    """Start a manager on one data directory; starting again closes the one before."""
    running: list[ChannelManager] = []

    async def opened(options: ManagerOptions | None = None, **kwargs: Any) -> ChannelManager:
        for manager in running:
            await manager.close()
        running.append(await ChannelManager.open(tmp_path / "data", options, **kwargs))
        return running[-1]

    yield opened
    for manager in running:
        await manager.close()

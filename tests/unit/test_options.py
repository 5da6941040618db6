"""Promise: options are keywords everywhere: shown by help(), checked, and refused by name when there is no such one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AppendLogStore,
    ChannelManager,
    EmbeddedConnection,
    FileChannel,
    LmdbStore,
    MessageLog,
    NatsConnection,
    RocksStore,
    Writer,
    embedded_connect,
    follow,
    nats_connect,
    watch_applied,
)
from penstock.channels import ChannelServer, Limits, ManagerOptions
from penstock.errors import OptionsError
from penstock.mqtt import Client, MqttServer
from penstock.options import options_from

OPENERS: list[tuple[Callable[..., Any], str]] = [
    (ChannelManager.open, "segment_bytes"),
    (ChannelServer, "plain_port"),
    (MqttServer, "ws_port"),
    (Client, "client_id"),
    (Writer.open, "roll_bytes"),
    (Writer.precreate, "roll_bytes"),
    (FileChannel.open, "keep_bytes"),
    (FileChannel.share, "keep_bytes"),
    (FileChannel.group, "lease_seconds"),
    (MessageLog.open, "segment_bytes"),
    (AppendLogStore.open, "sync"),
    (LmdbStore.open, "map_bytes"),
    (RocksStore.open, "sync"),
    (EmbeddedConnection, "sync"),
    (EmbeddedConnection.make, "max_bytes"),
    (embedded_connect, "sync"),
    (NatsConnection, "url"),
    (nats_connect, "ping_seconds"),
    (watch_applied, "max_updates"),
    (follow, "batch_records"),
]


@pytest.mark.parametrize(("opener", "option"), OPENERS, ids=lambda value: getattr(value, "__qualname__", value))
def test_help_shows_the_options_of_everything_that_is_opened(opener: Callable[..., Any], option: str) -> None:
    parameters = inspect.signature(opener).parameters
    assert option in parameters
    assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    documented = opener.__init__ if inspect.isclass(opener) else opener
    (told,) = (text for line, text in each_option(inspect.getdoc(documented) or "") if line.startswith(f"{option}:"))
    assert len(told) > 10, f"help() does not say what {option} does"


def each_option(text: str) -> list[tuple[str, str]]:
    """Return the lines of the options in a docstring, each with what stands below it."""
    lines = text.partition("Options, as of ")[2].splitlines()[1:]
    starts = [at for at, line in enumerate(lines) if line and not line.startswith(" ")]
    return [(lines[at], " ".join(lines[at + 1 : end])) for at, end in zip(starts, [*starts[1:], None], strict=True)]


def test_every_option_says_what_it_does() -> None:
    for opener, _ in OPENERS:
        documented = opener.__init__ if inspect.isclass(opener) else opener
        text = inspect.getdoc(documented) or ""
        assert [line for line, told in each_option(text) if not told] == [], opener


async def test_options_of_a_manager_are_keywords(tmp_path: Path) -> None:
    async with await ChannelManager.open(tmp_path, shards=2, limits=Limits(max_channels=3)) as manager:
        assert manager.options == ManagerOptions(shards=2, limits=Limits(max_channels=3))
    with pytest.raises(OptionsError, match="shard: there is no such option; did you mean shards"):
        await ChannelManager.open(tmp_path, shard=2)
    with pytest.raises(OptionsError, match="keywords or as one object, not both"):
        await ChannelManager.open(tmp_path, ManagerOptions(), shards=2)


def test_the_type_of_an_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="roll_bytes='1 GB': Expected `int`, got `str`"):
        Writer.open(tmp_path / "ticks", roll_bytes="1 GB")
    with pytest.raises(OptionsError, match="lease_secs: there is no such option; did you mean lease_seconds"):
        FileChannel.share(tmp_path / "jobs").group("g", lease_secs=5)
    with pytest.raises(OptionsError, match=r"Expected `int`, got `str` - at `\$.shards`"):
        options_from(ManagerOptions, None, {"shards": "8"})
    with pytest.raises(OptionsError, match="domain='nodot': not a domain"):
        options_from(ManagerOptions, None, {"domain": "nodot"})
    with pytest.raises(OptionsError, match="there is no such option; did you mean plain_port"):
        ChannelServer("data", plainport=0)
    with pytest.raises(OptionsError, match="tls_port=1: needs cert and key"):
        MqttServer(tls_port=1)

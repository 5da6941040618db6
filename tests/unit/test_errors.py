"""Promise: every error survives pickling, says what and where, and belongs to one tree."""

from __future__ import annotations

import pickle

import pytest

from penstock import errors
from penstock.errors import (
    ConflictError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    PenstockError,
    ProtocolError,
    Refused,
    ReplacedError,
    RetryError,
    Timeout,
)

ARGUMENTS = {
    CorruptionError: (("chan.1", 112, "commit byte is 2"), "chan.1 at byte 112: commit byte is 2"),
    ProtocolError: (("1.2.3.4:5", "CONNECT", "level 9"), "1.2.3.4:5 in CONNECT: level 9"),
    ExpiredError: (("orders", 12, 4096), "orders: position 12 has expired, the log begins at 4096"),
    Refused: (("FORBIDDEN", "not the owner"), "FORBIDDEN: not the owner"),
    ReplacedError: (("orders", "its log id changed"), "orders was replaced: its log id changed"),
}
ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling_with_everything_it_says(kind: type[PenstockError]) -> None:
    arguments, message = ARGUMENTS.get(kind, (("what happened",), "what happened"))
    error = kind(*arguments)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == str(error) == message
        assert again.args == error.args == arguments
        assert vars(again) == vars(error)


def test_an_error_names_its_parts() -> None:
    corrupt = CorruptionError("f", 7, "r")
    assert (corrupt.file, corrupt.byte, corrupt.reason) == ("f", 7, "r")
    expired = ExpiredError("l", 1, 2)
    assert (expired.log, expired.position, expired.first) == ("l", 1, 2)
    replaced = ReplacedError("l", "r")
    assert (replaced.log, replaced.reason) == ("l", "r")
    broken = ProtocolError("p", "k", "r")
    assert (broken.peer, broken.packet, broken.reason) == ("p", "k", "r")


def test_there_is_one_tree_and_it_fits_the_built_in_ones() -> None:
    assert all(issubclass(kind, PenstockError) for kind in ALL)
    assert issubclass(OptionsError, ValueError)
    assert issubclass(Timeout, TimeoutError)
    assert {kind.__name__ for kind in ALL if issubclass(kind, RetryError)} == {
        "RetryError", "Backpressure", "NotConnected", "Timeout",
    }  # fmt: skip
    assert {kind.__name__ for kind in ALL if issubclass(kind, ConflictError)} == {
        "ConflictError", "AlreadyExists", "RevisionMismatch", "LeaseLost",
    }  # fmt: skip
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("url", ["nats://me:s3cret@host/b", "tls://s3cret@host", "s3://key:s3cret@bucket/x"])
def test_no_error_shows_the_credentials_of_an_address(url: str) -> None:
    for error in (
        errors.OptionsError(f"{url}: only local paths are read"),
        errors.NotFoundError(f"{url}: nothing is here"),
        errors.CorruptionError(url, 0, "damaged"),
        errors.ReplacedError(url, "made again"),
        errors.ExpiredError(url, 1, 2),
        errors.NotConnected(f"{url}: away"),
    ):
        for shown in (str(error), repr(error), f"{error}", str(pickle.loads(pickle.dumps(error)))):
            assert "s3cret" not in shown
            assert "@" not in shown


def test_the_container_of_an_address_is_no_secret() -> None:
    assert "raw@account" in str(errors.OptionsError("abfss://raw@account.dfs.core.windows.net/x: no"))

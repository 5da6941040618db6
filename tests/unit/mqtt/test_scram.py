"""Promises about enhanced authentication: SCRAM-SHA-256 as RFC 7677 has it, and the AUTH packets around it."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from mqtt_statements import statement
from mqtt_use import Device, World

from penstock.errors import OptionsError, Refused
from penstock.mqtt import packets as p
from penstock.mqtt.packets import Properties
from penstock.mqtt.reasons import Reason
from penstock.mqtt.scram import SCRAM, ScramSha256, Verifier, make_verifier


def test_the_conversation_of_rfc_7677_goes_as_written_there() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    method = ScramSha256({"user": make_verifier("pencil", salt)}, nonce=lambda: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    conversation = method.begin()
    assert conversation.step(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == (
        False,
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    )
    assert conversation.step(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    ) == (True, b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    assert conversation.username == "user"


@pytest.mark.parametrize(
    "first", [b"", b"\xff", b"n,,n=user", b"p=tls-unique,,n=user,r=x", b"n,a=other,n=user,r=x", b"n,,m=x,n=user,r=x"]
)
def test_what_is_not_scram_is_refused(first: bytes) -> None:
    conversation = ScramSha256({}).begin()
    if first == b"":
        assert conversation.step(first) == (False, None)
        return
    with pytest.raises(Refused):
        conversation.step(first)


def test_an_unknown_user_is_led_to_the_end_and_gets_the_same_salt_each_time() -> None:
    method = ScramSha256({})
    answers = set()
    for _ in range(2):
        conversation = method.begin()
        answers.add((conversation.step(b"n,,n=nobody,r=x")[1] or b"").partition(b",s=")[2])
        with pytest.raises(Refused):
            conversation.step(b"c=biws,r=x,p=" + base64.b64encode(bytes(32)))
    assert len(answers) == 1


def test_a_verifier_is_read_again_and_nonsense_is_not() -> None:
    verifier = make_verifier("pencil")
    assert Verifier.parse(str(verifier)) == verifier
    for text in ("", "SCRAM-SHA-256$x", "SCRAM-SHA-1$4096:a$b:c"):
        with pytest.raises(OptionsError):
            Verifier.parse(text)


def answer_to(challenge: bytes, first: bytes, password: str) -> bytes:
    """What a client sends back."""
    fields = dict(part.partition("=")[::2] for part in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
    key = hmac.digest(salted, b"Client Key", "sha256")
    without = f"c=biws,r={fields['r']}"
    message = f"{first.decode()[3:]},{challenge.decode()},{without}".encode()
    signature = hmac.digest(hashlib.sha256(key).digest(), message, "sha256")
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
    return f"{without},p={proof}".encode()


FIRST = b"n,,n=ann,r=abc"


def begin(device: Device) -> p.Auth:
    (auth,) = device.send(
        p.Connect("dev", 5, properties=Properties(authentication_method=SCRAM, authentication_data=FIRST))
    )
    assert isinstance(auth, p.Auth)
    return auth


def go_on(device: Device, auth: p.Auth, password: str, reason: int = 0x18) -> list[p.Packet]:
    data = answer_to(auth.properties.authentication_data or b"", FIRST, password)
    return device.send(p.Auth(reason, Properties(authentication_method=SCRAM, authentication_data=data)))


@statement("4.12.0-2", "4.12.0-3", "4.12.0-5")
def test_a_client_comes_in_with_scram_under_its_own_name() -> None:
    world = World(methods={SCRAM: ScramSha256({"ann": make_verifier("pencil", iterations=10)})}, anonymous=False)
    device = Device(world.broker)
    auth = begin(device)
    assert (auth.reason, auth.properties.authentication_method) == (0x18, SCRAM)
    (connack,) = go_on(device, auth, "pencil")
    assert isinstance(connack, p.Connack)
    assert (connack.reason, connack.properties.authentication_method) == (0, SCRAM)
    assert (connack.properties.authentication_data or b"").startswith(b"v=")
    assert world.broker.sessions["dev"].username == "ann"


@statement("4.12.0-4")
def test_a_wrong_proof_is_refused() -> None:
    world = World(methods={SCRAM: ScramSha256({"ann": make_verifier("pencil", iterations=10)})})
    device = Device(world.broker)
    (connack,) = go_on(device, begin(device), "pen")
    assert isinstance(connack, p.Connack)
    assert connack.reason == Reason.NOT_AUTHORIZED
    assert device.closed
    assert world.broker.sessions == {}


@statement("3.1.2-30")
def test_before_connack_only_auth_and_disconnect_may_come() -> None:
    world = World(methods={SCRAM: ScramSha256({"ann": make_verifier("pencil", iterations=10)})})
    for packet in (
        p.Publish("a", b"x", retain=True),
        p.Ping(),
        p.Auth(0x18, Properties(authentication_method="OTHER")),
    ):
        device = Device(world.broker)
        begin(device)
        (connack,) = device.send(packet)
        assert connack == p.Connack(False, Reason.PROTOCOL_ERROR)
        assert device.closed
    assert len(world.broker.retained) == 0


@statement("4.12.1-1", "4.12.1-2")
def test_a_client_authenticates_again_and_traffic_goes_on() -> None:
    world = World(methods={SCRAM: ScramSha256({"ann": make_verifier("pencil", iterations=10)})})
    device = Device(world.broker)
    go_on(device, begin(device), "pencil")
    again = p.Auth(0x19, Properties(authentication_method=SCRAM, authentication_data=FIRST))
    (auth,) = device.send(again)
    assert isinstance(auth, p.Auth)
    assert device.send(p.Ping()) == [p.Pong()]
    (done,) = go_on(device, auth, "pencil")
    assert isinstance(done, p.Auth)
    assert done.reason == 0
    (auth,) = device.send(again)
    assert isinstance(auth, p.Auth)
    (end,) = go_on(device, auth, "wrong")
    assert isinstance(end, p.Disconnect)
    assert end.reason == Reason.NOT_AUTHORIZED
    assert device.closed


def test_another_method_on_an_open_connection_is_an_error() -> None:
    world = World(methods={SCRAM: ScramSha256({"ann": make_verifier("pencil", iterations=10)})})
    device = Device(world.broker)
    go_on(device, begin(device), "pencil")
    (end,) = device.send(p.Auth(0x19, Properties(authentication_method="OTHER")))
    assert end.reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]

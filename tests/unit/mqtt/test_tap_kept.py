"""A tap and the state of its broker: which QoS 2 messages were taken stands in both, and a kill may come in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqtt_state_use import Kept

from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.mqtt import packets as p
from penstock.mqtt.packets import Kind
from penstock.mqtt.tap import Tap, TapSpec
from penstock.mqtt.tapped import _note_of


def attached(kept: Kept, path: str) -> Tap:
    tap = Tap(TapSpec(filter="#", path=path, on_failure="refuse"), kept.broker)
    tap.attach()
    return tap


def payloads(path: str) -> list[bytes]:
    with open_log(path) as log:
        return [decode_envelope(payload).payload for payload in log.read(log.first_position).to_payloads()]


def no_room(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_refused_message_is_a_new_one_when_it_comes_again_after_a_kill(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    kept = Kept()
    tap = attached(kept, path)
    pub = kept.device("pub", version=4)
    tap._open = no_room  # type: ignore[method-assign]
    pub.publish("a", b"1", 2, 7)
    kept.kept.gate.end_turn()  # the turn is written; the process dies before the next one
    tap._close_logs()
    kept.kill()
    tap = attached(kept, path)
    pub = kept.device("pub", version=4)
    pub.publish("a", b"1", 2, 7, dup=True)
    kept.settle()
    assert pub.read() == [p.Ack(Kind.PUBREC, 7)]
    assert payloads(path) == [b"1"]
    tap._detach()
    tap._close_logs()
    kept.kept.close()


def test_what_a_power_cut_took_from_a_log_stays_forgotten_after_a_kill(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    kept = Kept()
    tap = attached(kept, path)
    pub = kept.device("pub")
    for number in (3, 4, 9):
        pub.publish("a", b"%d" % number, 2, number)
    kept.settle()
    assert kept.broker.sessions["pub"].received == {3, 4, 9}
    tap._close_logs()
    kept.kill()
    note = _note_of(path)
    note.write(bytes(16), 1 << 40, sync=False)  # of another boot: the log was longer then
    note.close()
    tap = attached(kept, path)
    tap._close_logs()
    kept.settle()
    kept.kill()
    assert kept.broker.sessions["pub"].received == set()
    kept.kept.close()

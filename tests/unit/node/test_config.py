"""A configuration is explained: every mistake with its line, and the nearest name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from penstock.errors import OptionsError
from penstock.node.config import (
    NodeConfig,
    changes,
    check_config,
    check_files,
    differing,
    effective_config,
    load_config,
)
from penstock.node.template import TEMPLATE

FIFTEEN = """\
dta = "elsewhere"
on_failure = "panic"
drain_seconds = -1
log_format = 3

[mqtt]
port = "1883"
prot = 1884
bind = ["127.0.0.1"]
tls_port = 8883
[mqtt.broker]
maximum_qos = 3
max_qeued_bytes = 5
[htp]
port = 1
[http]
port = 70000
token = "${NOT_SET_ANYWHERE}"
[[fold]]
name = "latest"
log = "readings"
[[fold]]
name = "other"
log = "readings"
store = "x.snap"
backend = "bdb"
"""


def test_an_empty_configuration_is_a_node_that_serves() -> None:
    assert check_config("", {}) == (NodeConfig(), [])


def test_the_template_is_a_configuration_and_says_the_defaults() -> None:
    assert check_config(TEMPLATE, {}) == (NodeConfig(), [])
    uncommented = "\n".join(
        line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in TEMPLATE.splitlines()
    )
    found, mistakes = check_config(uncommented, {"PENSTOCK_TOKEN": "t"})
    assert [str(mistake) for mistake in mistakes] == []
    assert found is not None


def test_fifteen_mistakes_get_fifteen_answers() -> None:
    _, mistakes = check_config(FIFTEEN, {"PENSTOCK__MQTT__PORT__DEEP": "1"})
    told = {mistake.key: mistake for mistake in mistakes}
    expected = {
        "dta": (1, "did you mean data?"),
        "on_failure": (2, "panic"),
        "drain_seconds": (3, "must not be negative"),
        "log_format": (4, ""),
        "mqtt.port": (7, ""),
        "mqtt.prot": (8, "did you mean port?"),
        "mqtt.bind": (9, ""),
        "mqtt.tls_port": (10, "needs cert and key"),
        "mqtt.broker.maximum_qos": (12, "between 0 and 2"),
        "mqtt.broker.max_qeued_bytes": (13, "did you mean max_queued_bytes?"),
        "htp": (14, "did you mean http?"),
        "http.port": (17, "65535"),
        "http.token": (18, "NOT_SET_ANYWHERE is not set"),
        "fold[0].store": (19, "must be given"),
        "fold[1].backend": (26, "bdb"),
        "PENSTOCK__MQTT__PORT__DEEP": (0, "port is a value, not a table"),
    }
    for key, (line, words) in expected.items():
        assert key in told, f"{key} in {sorted(told)}"
        assert (told[key].line, words in told[key].reason) == (line, True), str(told[key])
    assert len(mistakes) == len(expected) == 16


def test_what_the_options_refuse_when_they_are_made_has_its_line() -> None:
    _, (mistake,) = check_config("[mqtt]\nbind = '127.0.0.1'\ntls_port = 8883\n", {})
    assert (mistake.line, mistake.key, "needs cert and key" in mistake.reason) == (3, "mqtt.tls_port", True)
    _, (mistake,) = check_config("data = 'x'\ndrain_seconds = -1\n", {})
    assert (mistake.line, mistake.key) == (2, "drain_seconds")


def test_a_table_with_several_refused_values_gets_an_answer_for_each() -> None:
    text = "[ingest]\nbind = '0.0.0.0'\nqueue_bytes = 1\n[mqtt]\nport = 99999\ntls_port = 8883\n"
    _, mistakes = check_config(text + "[[channel]]\nname = 'a b'\n[[export]]\nfold = 'x'\nurl = 'y'\n", {})
    found = [(mistake.line, mistake.key) for mistake in mistakes]
    assert found == [
        (2, "ingest.bind"),
        (3, "ingest.queue_bytes"),
        (5, "mqtt.port"),
        (6, "mqtt.tls_port"),
        (8, "channel[0].name"),
        (10, "export[0].fold"),
    ]


def test_a_wrong_kind_of_value_is_said_in_plain_words() -> None:
    _, mistakes = check_config("data = 5\non_failure = 'panic'\n[mqtt]\nport = 'x'\n[channels]\nlimits = 3\n", {})
    assert [str(mistake) for mistake in mistakes] == [
        "line 1: data: must be text, not a whole number",
        "line 2: on_failure: must be serve or stop, not 'panic'",
        "line 4: mqtt.port: must be a whole number, not text",
        "line 6: channels.limits: must be a table, not a whole number",
    ]


def test_the_template_shows_every_table() -> None:
    for table in ("mqtt.taps", "mqtt.feeds", "channel", "fold", "ship", "export", "meeting"):
        assert f"[[{table}]]" in TEMPLATE
    uncommented = re.sub(r"(?m)^# (?=(\[|\w+ = |\"\*\"))", "", TEMPLATE)
    _, mistakes = check_config(uncommented, {"PENSTOCK_TOKEN": "x"})
    assert mistakes == []


def test_a_syntax_error_has_its_line() -> None:
    _, (mistake,) = check_config("[mqtt]\nport = = 3\n", {})
    assert mistake.line == 2


def test_the_environment_overrides_the_file() -> None:
    found, mistakes = check_config("[mqtt]\nport = 1\n", {"PENSTOCK__MQTT__PORT": "2", "PENSTOCK__DATA": "there"})
    assert (mistakes, found and found.mqtt.port, found and found.data) == ([], 2, "there")


def test_two_folds_of_one_name_are_refused() -> None:
    fold = '[[fold]]\nname = "a"\nlog = "l"\nstore = "{}"\n'
    _, (mistake,) = check_config(fold.format("1") + fold.format("2"), {})
    assert "two have the name a" in mistake.reason


def test_a_command_line_overrides_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__MQTT__PORT", "2")
    assert load_config(None, {"mqtt.port": 3}).mqtt.port == 3
    with pytest.raises(OptionsError, match="did you mean port"):
        load_config(None, {"mqtt.prt": 3})


def test_changes_are_named_and_secrets_are_not_shown() -> None:
    before, _ = check_config("", {})
    after, _ = check_config("[http]\ntoken = 'secret'\nport = 1\n", {})
    assert before is not None
    assert after is not None
    assert [line.partition(":")[0] for line in changes(before, after)] == ["http.port", "http.token"]
    assert "secret" not in str(changes(before, after))
    assert differing(effective_config(after), effective_config(before)) == {"http": {"port": 1, "token": "(hidden)"}}


SECRETIVE = """\
[http]
token = "secret-{n}"
[mqtt.scram]
alice = "secret-{n}"
[[mqtt.bridges]]
name = "up"
send = [{{filter = "a/#"}}]
[mqtt.bridges.remote]
url = "mqtt://me:secret-{n}@hub"
password = "secret-{n}"
"""


def test_secrets_inside_lists_and_urls_are_in_no_output() -> None:
    before, _ = check_config(SECRETIVE.format(n=1), {})
    after, mistakes = check_config(SECRETIVE.format(n=2), {})
    assert before is not None, mistakes
    assert after is not None, mistakes
    shown = effective_config(after)
    assert "secret" not in str(shown)
    assert shown["mqtt"]["bridges"][0]["remote"]["password"] == "(hidden)"
    assert tomllib.loads(tomli_w.dumps(shown)) == shown  # it can be written
    lines = changes(before, after)
    assert "secret" not in str(lines)
    assert [line.partition(":")[0] for line in lines] == [  # but that they change is said
        "http.token",
        "mqtt.bridges[up].remote.password",
        "mqtt.bridges[up].remote.url",
        "mqtt.scram.alice",
    ]


def test_a_change_of_a_list_names_what_comes_goes_and_changes() -> None:
    fold = '[[fold]]\nname = "{0}"\nlog = "l"\nstore = "{1}"\n'
    before, _ = check_config(fold.format("a", "1") + fold.format("b", "2"), {})
    after, _ = check_config(fold.format("b", "3") + fold.format("c", "4"), {})
    assert before is not None
    assert after is not None
    lines = [line.partition("  (")[0] for line in changes(before, after)]
    assert "fold[b].store: 2 → 3" in lines
    assert "fold[a].store: 1 → -" in lines
    assert "fold[c].store: - → 4" in lines
    assert not any(line.startswith("fold[b].log") for line in lines)


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        ("[mqtt]\nbind = 'not an address'\n", 2, "mqtt.bind", "an address or the name of a host"),
        ("[http]\nbind = 'a..b'\n", 2, "http.bind", "an address or the name of a host"),
        ("[http]\nbind = ''\n", 2, "http.bind", "an address or the name of a host"),  # not every address there is
        ("[channels]\nbind = ''\n", 2, "channels.bind", "an address or the name of a host"),
        ("[mqtt]\ncert = 'x.pem'\n", 2, "mqtt.cert", "needs key"),
        ("[channels]\nkey = 'x.key'\n", 2, "channels.key", "needs cert"),
        ("[channels]\nmodulator = 'shop'\n", 2, "channels.modulator", "module:Class"),
        ("[channels.tap]\n'*' = 5\n", 2, "channels.tap.*", "must be text, not a whole number"),
        ("[[mqtt.taps]]\nfilter = 'a'\npath = 'x/{y}'\n", 3, "mqtt.taps[0].path", "{y} is no field"),
        (
            "[[mqtt.taps]]\nfilter = 'a'\npath = 'x'\n[mqtt.taps.options]\nrol_bytes = 5\n",
            4,
            "mqtt.taps[0].options",
            "there is no option rol_bytes; did you mean roll_bytes?",
        ),
        ("[[ship]]\nlog = 'l'\nurl = 'ftp://x'\n", 3, "ship[0].url", "objects are at one of"),
        ("[[ship]]\nlog = ''\nurl = 's3://b'\n", 2, "ship[0].log", "must not be empty"),
        ("[ingest]\nport = 1883\n", 2, "ingest.port", "1883 is taken by mqtt.port"),
        ("[mqtt]\nport = 8780\n", 2, "mqtt.port", "8780 is taken by http.port"),
        ("[[fold]]\nname = 'a/b'\nlog = 'l'\nstore = 's'\n", 2, "fold[0].name", "beginning with a letter"),
        ("drain_seconds = inf\n", 1, "drain_seconds", "a number of seconds"),
        ("[ledger]\nlook_seconds = nan\n", 2, "ledger.look_seconds", "above 0"),
        ("data = ''\n", 1, "data", "must not be empty"),
        ("data = 'a\u2028b'\r\n[mqtt] # MQTT\r\nprt = 1\r\n", 3, "mqtt.prt", "did you mean port?"),
        ("[disk]\nalarm_at = 0.95\n", 2, "disk.alarm_at", "sacrifice_at (0.9) must not be below alarm_at"),
        ("[disk]\nsacrifice_at = 0.2\n", 2, "disk.sacrifice_at", "must not be below alarm_at (0.8)"),
        ("[telemetry]\nendpoint = 'collector'\n", 2, "telemetry.endpoint", "http://"),
        ("[mqtt]\nport = 1\nport = 2\n", 3, "port", "stands twice; the first is on line 2"),
        ("[[channel]]\nname = 'a'\n[[channel]]\nname = 'a'\n", 4, "channel[1].name", "two have the name a"),
        ("[[export]]\nfold = 'x'\nurl = 's3://b'\n", 2, "export[0].fold", "there is no fold x; there is none"),
        ("[[channel]]\nname = 'a'\nsegment_bytes = 999999999999999\n", 3, "channel[0].segment_bytes", "at most 1 TiB"),
        (
            "[[channel]]\nname = 'a'\nformat = 'xchannel'\nsegment_bytes = 9999999999999\n",
            4,
            "channel[0].segment_bytes",
            "segment_bytes=9999999999999: a position names a byte of a file of at most 1 TiB",
        ),
        ("[[channel]]\nname = 'a'\nmax_payload_bytes = 5000000000\n", 3, "channel[0].max_payload_bytes", "4 GiB"),
        ("[http]\ntoken = '${NOT'\n", 2, "http.token", "${ without a variable"),
        ("[http]\ntoken = '${NOT-THIS}'\n", 2, "http.token", "${ without a variable"),
        ("[http]\ntoken = '${EMPTY}'\n", 2, "http.token", "EMPTY is empty in the environment"),
        ("[[fold]]\nname = 'a'\nlog = 'l'\nstore = './l'\n", 4, "fold[0].store", "./l is its own log"),
        (
            "[[channel]]\nname = 'a'\n[[fold]]\nname = 'f'\nlog = 'l'\nstore = 'penstock-data/logs/a'\n",
            6,
            "fold[0].store",
            "the log of channel a",
        ),
        (
            "[http]\nenabled = false\n"
            + "".join(f"[{one}]\nenabled = false\n" for one in ("mqtt", "channels", "ingest")),
            2,
            "http.enabled",
            "no part is enabled",
        ),
    ],
)
def test_what_could_not_work_is_a_mistake_of_its_own_line(text: str, line: int, key: str, words: str) -> None:
    _, (mistake,) = check_config(text, {"EMPTY": ""})
    assert (mistake.line, mistake.key) == (line, key)
    assert words in mistake.reason


def test_a_mistake_of_one_table_is_not_blamed_on_another() -> None:
    text = "[[fold]]\nname = 'a'\nlog = 'l'\nstore = 's'\nbackend = 'bdb'\n[[export]]\nfold = 'a'\nurl = 's3://b'\n"
    _, mistakes = check_config(text + "[mqtt]\nport = 1884\nprot = 1\n[http]\nport = 1883\n", {})
    assert [mistake.key for mistake in mistakes] == ["fold[0].backend", "mqtt.prot"]


def test_a_mistake_in_the_environment_names_its_variable() -> None:
    _, (first, second) = check_config("", {"PENSTOCK__MQTT__PRT": "1", "PENSTOCK__HTTP__PORT": "x"})
    assert (first.key, first.reason) == ("PENSTOCK__HTTP__PORT", "must be a whole number, not text")
    assert (second.key, second.reason) == ("PENSTOCK__MQTT__PRT", "there is no such key; did you mean port?")


def test_a_folder_in_the_place_of_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        load_config(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: Is a directory"


def test_what_no_value_can_be_is_a_mistake_and_no_end() -> None:
    digits = "9" * 5000  # more than Python reads
    assert "more digits" in str(check_config(f"[mqtt]\nport = {digits}\n", {})[1][0])
    assert "whole number" in str(check_config("", {"PENSTOCK__MQTT__PORT": digits})[1][0])
    assert str(check_config("", {"PENSTOCK__DATA": "p\udcfcmp"})[1][0]) == "PENSTOCK__DATA: must be UTF-8"
    with pytest.raises(OptionsError, match="data: must be UTF-8"):
        load_config(None, {"data": "p\udcfcmp"})


def test_a_table_that_is_none_is_a_mistake_with_a_command_line_too(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("mqtt = 5\n")
    with pytest.raises(OptionsError, match="line 1: mqtt: must be a table, not a whole number"):
        load_config(str(tmp_path / "penstock.toml"), {"mqtt.port": 0})


def test_a_file_that_begins_with_a_mark_of_its_editor_is_read() -> None:
    found, mistakes = check_config("\ufeff[mqtt]\nport = 1\n", {})
    assert not mistakes
    assert found is not None
    assert found.mqtt.port == 1


def test_a_data_directory_that_is_a_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "d").touch()
    text = "[mqtt]\n[http]\nport = 0\n"
    found, _ = check_config(f"data = '{tmp_path}/d'\n{text}", {})
    assert found is not None
    assert [str(one) for one in check_files(f"data = '{tmp_path}/d'\n{text}", found)] == [
        f"line 1: data: {tmp_path}/d: Not a directory"
    ]

"""Run mosquitto's generic broker tests against a broker of ours: run_mosquitto.py FOLDER [script …]

FOLDER is the ``test`` folder of eclipse-mosquitto/mosquitto on GitHub, which is no part of this repository.  Scripts
start ``$BUILD_ROOT/src/mosquitto``; a program of that name, made here, is as_mosquitto.py beside this file.  They
compare bytes, so a script that fails may just expect mosquitto's own choices.  They run in a copy, in which a broker
has longer to start.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 60
GENERIC = """
01-connect-allow-anonymous 01-connect-auto-id 01-connect-disconnect-v5 01-connect-take-over
01-connect-windows-line-endings
02-shared-qos0-v5 02-subhier-crash 02-subpub-b2c-topic-alias 02-subpub-qos0-long-topic 02-subpub-qos0-send-retain
02-subpub-qos0-subscription-id 02-subpub-qos0-topic-alias 02-subpub-qos1-message-expiry
02-subpub-qos1-message-expiry-retain
02-subpub-qos1-message-expiry-will 02-subpub-qos2-1322 02-subpub-qos2-receive-maximum-1 02-subpub-qos2-receive-maximum-2
02-subpub-recover-subscriptions 02-subscribe-long-topic 02-subscribe-persistence-flipflop 03-pattern-matching
03-publish-b2c-disconnect-qos1 03-publish-b2c-disconnect-qos2 03-publish-b2c-qos1-len 03-publish-b2c-qos2-len
03-publish-c2b-disconnect-qos2 03-publish-long-topic 03-publish-qos1-no-subscribers-v5 03-publish-qos2-reuse-mid
04-retain-clear-multiple 04-retain-qos0-repeated 05-clean-session-qos1 05-session-expiry-v5 05-session-expiry-kick
07-will-* 09-auth-bad-method 12-prop-assigned-client-identifier 12-prop-maximum-packet-size-publish-qos1
12-prop-maximum-packet-size-publish-qos2 12-prop-response-topic 12-prop-response-topic-correlation-data
20-sparkplug-compliance msg_sequence_test
"""
STARTER = """#!/bin/sh
exec {python} {starter} "$@"
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(script: Path, build: Path) -> tuple[bool, str]:
    environment = {**os.environ, "BUILD_ROOT": str(build)}
    ports = re.search(r"get_port\((\d+)\)", script.read_text())  # it takes no more than it asks for
    wanted = [str(free_port()) for _ in range(int(ports[1]) if ports else 1)]
    command = [sys.executable, "-W", "ignore", script.name, *wanted]
    if script.name == "msg_sequence_test.py":  # it leaves at the first time-out; the count is wanted
        text = re.sub(r"\bexit\(\)", "pass", script.read_text())
        text = text.replace("timeout=2", "timeout=1").replace("port=1888", f"port={wanted[0]}")
        (script.parent / "msg_sequence_counted.py").write_text(text)
        command[3] = "msg_sequence_counted.py"
    try:
        done = subprocess.run(
            command,
            cwd=script.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {SECONDS} s"
    return done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    wanted = sys.argv[2:]
    passed, failed = 0, 0
    with tempfile.TemporaryDirectory() as build:
        folder = Path(shutil.copytree(sys.argv[1], Path(build, "test"))) / "broker"
        helper = folder.parent / "mosq_test.py"
        helper.write_text(
            helper.read_text().replace("range(0, 20)", "range(0, 300)").replace("range(20)", "range(300)")
        )
        starter = Path(build, "src", "mosquitto")
        starter.parent.mkdir()
        starter.write_text(STARTER.format(python=sys.executable, starter=HERE / "as_mosquitto.py"))
        starter.chmod(0o755)
        for name in wanted or GENERIC.split():
            for script in sorted(folder.glob(f"{name}.py")):
                good, output = run(script, Path(build))
                passed, failed = passed + good, failed + (not good)
                print(f"{script.stem}: {'passed' if good else 'FAILED'}", flush=True)
                if not good:
                    print("\n".join("    " + line for line in output.splitlines()[-12:]), flush=True)
    print(f"{passed} of {passed + failed} passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

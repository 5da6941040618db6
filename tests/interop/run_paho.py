"""Run paho's interoperability suite against a broker of ours: run_paho.py FOLDER [case …]

FOLDER is the ``interoperability`` folder of eclipse-paho/paho.mqtt.testing on GitHub, which is no part of this
repository.  Every case has its own broker and its own time-out, because some of them wait without a bound.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 120
DRIVER = """
import sys, unittest
sys.path.insert(0, {folder!r})
sys.argv = ["client_test"]
import {module} as suite
suite.host, suite.port = "127.0.0.1", {port}
suite.topic_prefix = "client_test5/"
suite.topics = [suite.topic_prefix + topic for topic in ["TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA"]]
suite.wildtopics = [suite.topic_prefix + topic for topic in ["TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#"]]
suite.nosubscribe_topics = ("test/nosubscribe",)
if {module!r} == "client_test":
    suite.topics = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
    suite.wildtopics = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")
names = [{case!r}] if {case!r} else None
unittest.main(module=suite, argv=["client_test"] + (["Test." + names[0]] if names else []))
"""


def cases(folder: Path, module: str) -> list[str]:
    return re.findall(r"^\s+def (test_?\w+)\(self", (folder / f"{module}.py").read_text(), re.MULTILINE)


def run(folder: Path, module: str, case: str) -> tuple[bool, str]:
    broker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "mqtt",
            "serve",
            "--port",
            "0",
            "--json",
            "--config",
            HERE / "paho.toml",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        port = int(json.loads(broker.stdout.readline())["listeners"]["mqtt"].rpartition(":")[2])
        script = DRIVER.format(folder=str(folder), module=module, port=port, case=case)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return done.returncode == 0, done.stderr
    except subprocess.TimeoutExpired as exc:
        return False, f"no end after {SECONDS} s\n{(exc.stderr or b'').decode()}"
    finally:
        broker.terminate()
        broker.wait(10)


def main() -> None:
    folder, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    failed = 0
    for module in ("client_test", "client_test5"):
        names = [case for case in cases(folder, module) if not wanted or case in wanted]
        passed = 0
        for case in names:
            good, output = run(folder, module, case)
            passed += good
            print(f"{module}.{case}: {'passed' if good else 'FAILED'}", flush=True)
            if not good:
                failed += 1
                print(output[-3000:])
        print(f"{module}: {passed} of {len(names)} passed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

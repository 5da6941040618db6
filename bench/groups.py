"""How fast do workers share a queue, and what does it cost that several processes send?

    python bench/groups.py [--quick] [--json]

Every queue gets N messages of 64 bytes and hands each of them to one worker, which acknowledges it, one at a time and,
where there is such a thing, many at a time.  The same with two worker processes that share the queue.  Then one to four
processes send at once.  Penstock syncs nothing here; SQLite does what it does by default in each library.
persist-queue, litequeue and huey are in the dependency group ``bench``; huey is measured with tasks that do nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

from penstock.log.filechannel import FileChannel

PAYLOAD = b"x" * 64
Rate = tuple[float, float]
"""Messages a second: sent, and handed out and acknowledged."""


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def penstock_fill(folder: str, count: int) -> None:
    with FileChannel.open(folder, sync="none", compression="none") as queue:
        queue.append_many([PAYLOAD] * count)


def penstock_drain(folder: str, at_once: int) -> int:
    done = 0
    with FileChannel.attach(folder) as view:
        group = view.group("bench")
        while jobs := group.take_many(at_once):
            jobs.ack()
            done += len(jobs)
    return done


def penstock_one(folder: str, count: int, at_once: int = 1) -> Rate:
    with FileChannel.open(folder, sync="none", compression="none") as queue:
        send = queue.tx().send
        sent = timed(lambda: [send(PAYLOAD) for _ in range(count)])
        return count / sent, count / timed(lambda: penstock_drain(folder, at_once))


def penstock_many(folder: str, count: int) -> Rate:
    return penstock_one(folder, count, 100)


def persist_ack(folder: str, count: int) -> Rate:
    import persistqueue

    queue = persistqueue.SQLiteAckQueue(folder)
    sent = timed(lambda: [queue.put(PAYLOAD) for _ in range(count)])

    def drain() -> None:
        for _ in range(count):
            queue.ack(queue.get())

    taken = timed(drain)
    queue.close()
    return count / sent, count / taken


def lite_fill(folder: str, count: int) -> None:
    import litequeue

    queue = litequeue.LiteQueue(folder)
    for _ in range(count):
        queue.put(PAYLOAD)
    queue.close()


def lite_drain(folder: str) -> int:
    import litequeue

    queue, done = litequeue.LiteQueue(folder), 0
    while (message := queue.pop()) is not None:
        queue.done(message.message_id)
        done += 1
    queue.close()
    return done


def lite(folder: str, count: int) -> Rate:
    return count / timed(lambda: lite_fill(folder, count)), count / timed(lambda: lite_drain(folder))


def huey_tasks(folder: str, count: int) -> Rate:
    from huey import SqliteHuey

    queue = SqliteHuey(filename=folder)

    @queue.task()
    def work(payload: bytes) -> None:
        del payload

    sent = timed(lambda: [work(PAYLOAD) for _ in range(count)])

    def drain() -> None:
        for _ in range(count):
            queue.execute(queue.dequeue())

    return count / sent, count / timed(drain)


def together(work: Callable[..., object], arguments: list[tuple[object, ...]]) -> float:
    """Return how long processes take that begin at the same moment."""
    context = multiprocessing.get_context("spawn")
    begin, end = (context.Barrier(len(arguments) + 1) for _ in range(2))
    processes = [context.Process(target=_at_once, args=(begin, end, work, args)) for args in arguments]
    for process in processes:
        process.start()
    begin.wait()
    seconds = timed(end.wait)
    for process in processes:
        process.join()
    return seconds


def _at_once(begin: Barrier, end: Barrier, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    begin.wait()
    try:
        work(*arguments)
    except BaseException:
        end.abort()  # who waits there is told at once
        raise
    end.wait()


def send_shared(folder: str, count: int, at_once: int) -> None:
    with FileChannel.share(folder, sync="none") as queue:
        if at_once == 1:
            for _ in range(count):
                queue.append(PAYLOAD)
        else:
            for _ in range(count // at_once):
                queue.append_many([PAYLOAD] * at_once)


def send_alone(folder: str, count: int, at_once: int) -> None:
    with FileChannel.open(folder, sync="none", compression="none") as queue:
        send = queue.tx().send if at_once == 1 else queue.tx().send_many
        what = PAYLOAD if at_once == 1 else [PAYLOAD] * at_once
        for _ in range(count // at_once):
            send(what)  # type: ignore[operator]


def fresh(work: Callable[[str], object]) -> object:
    folder = tempfile.mkdtemp(prefix="penstock-bench-")
    try:
        return work(folder + "/queue")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sharing(quick: bool) -> list[dict[str, object]]:
    """Return the rows of one worker, and of two processes that share a queue."""
    own, peer = (300, 50) if quick else (20_000, 1_000)
    rows: list[dict[str, object]] = []
    for name, work, count in (
        ("penstock group, one at a time", penstock_one, own),
        ("penstock group, 100 at a time", penstock_many, own * 5),
        ("persist-queue SQLiteAckQueue", persist_ack, peer),
        ("litequeue", lite, peer),
        ("huey on SQLite, empty tasks", huey_tasks, peer),
    ):
        sent, taken = fresh(lambda folder, work=work, count=count: work(folder, count))  # type: ignore[misc]
        rows.append({"queue": name, "workers": 1, "sent": sent, "taken": taken})
    for name, fill, drain, extra, count in (
        ("penstock group, one at a time", penstock_fill, penstock_drain, (1,), own),
        ("penstock group, 100 at a time", penstock_fill, penstock_drain, (100,), own * 5),
        ("litequeue", lite_fill, lite_drain, (), peer),
    ):

        def race(
            folder: str, fill: object = fill, drain: object = drain, extra: tuple[int, ...] = extra, count: int = count
        ) -> float:
            fill(folder, count)  # type: ignore[operator]
            return count / together(drain, [(folder, *extra)] * 2)  # type: ignore[arg-type]

        rows.append({"queue": name, "workers": 2, "sent": None, "taken": fresh(race)})
    return rows


def sending(quick: bool) -> list[dict[str, object]]:
    """Return the rows of one owner, and of one to four processes that send in turns."""
    one, many = (200, 2_000) if quick else (20_000, 1_000_000)
    rows: list[dict[str, object]] = []
    for name, work, processes in (
        ("one owner", send_alone, 1),
        ("shared", send_shared, 1),
        ("shared", send_shared, 2),
        ("shared", send_shared, 4),
    ):
        for at_once, count in ((1, one), (1000, many)):
            each = count // processes // at_once * at_once or at_once

            def race(
                folder: str, work: object = work, processes: int = processes, each: int = each, at_once: int = at_once
            ) -> float:
                FileChannel.open(folder, sync="none").close()
                return each * processes / together(work, [(folder, each, at_once)] * processes)  # type: ignore[arg-type]

            rows.append({"sender": name, "processes": processes, "at once": at_once, "sent": fresh(race)})
    return rows


def table(rows: list[dict[str, object]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (
            f"{cell:,.0f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row.values()
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: small counts")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    shared, sent = sharing(arguments.quick), sending(arguments.quick)
    if arguments.json:
        print(json.dumps({"sharing": shared, "sending": sent}))
        return
    print(f"Messages a second.\n\n{table(shared)}\n\nProcesses that send at once:\n\n{table(sent)}")


if __name__ == "__main__":
    main()

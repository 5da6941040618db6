"""One process writes, another reads: run it and watch the messages arrive."""

import multiprocessing
import os
import tempfile

from penstock import Reader, Writer


def produce(path: str) -> None:
    """Append a few orders to the channel."""
    with Writer.open(path) as writer:
        for number in range(5):
            writer.append(b'{"order": %d}' % number, kind=1)


def main() -> None:
    """Read what the other process writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "orders")
        Writer.precreate(path)
        with Reader.open(path) as reader:
            process = multiprocessing.get_context("spawn").Process(target=produce, args=(path,))
            process.start()
            for _ in range(5):
                record = reader.read(timeout=30)
                print(record.position, record.kind, bytes(record.payload).decode())
            process.join()


if __name__ == "__main__":
    main()

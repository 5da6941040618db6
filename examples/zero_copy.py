"""Fill a record where it will be read, and look at many at once without copying: needs numpy only."""

import os
import tempfile

import numpy as np

from penstock import Reader, Writer

POINT = np.dtype([("x", "<f4"), ("y", "<f4")])


def main() -> None:
    """Write points in place, then read them back as views of the mapped file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "points")
        with Writer.open(path, region_bytes=64 << 10, roll_bytes=1 << 20) as writer:
            for number in range(1000):
                with writer.reserving(POINT.itemsize) as record:
                    np.frombuffer(record.buffer, POINT)[0] = (number, number**0.5)
        with Reader.open(path) as reader:
            batch = reader.read_batch()
            last = np.frombuffer(batch.payload(-1), POINT)[0]
            print(len(batch), "points, the last one", last["x"], round(float(last["y"]), 3))


if __name__ == "__main__":
    main()

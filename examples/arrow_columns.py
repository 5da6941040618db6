"""A channel as Arrow columns, written from one and read into others (needs the arrow extra)."""

import os
import tempfile

import pyarrow as pa
import pyarrow.compute as pc

from penstock import Writer, open_log


def main() -> None:
    """Append an Arrow column, read it back as a record batch and compute on it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "words")
        with Writer.open(path) as writer:
            writer.append_many(pa.array(["weir", "sluice", "flume"] * 1000), kind=7)
        with open_log(path) as log:
            records = log.read(log.first_position)
            views = records.to_arrow()  # the payloads stay where they are, in the mapped file
            copied = records.to_arrow(view=False)  # in one run, for engines that do not know views yet
            print(views.schema.field("payload").type, copied.schema.field("payload").type)
            print(copied.num_rows, "words,", pc.sum(pc.binary_length(copied["payload"])).as_py(), "bytes")


if __name__ == "__main__":
    main()

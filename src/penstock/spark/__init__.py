"""Floor 8: Spark on every channel.

``session()`` starts a quiet local Spark that knows the format ``penstock``; ``register(spark)`` teaches it to a session
that is there already.  Everything else is in the modules:

    source/    spark.read(Stream).format("penstock"): plan, reading, stream, tables of folds and channels
    sink/      write(Stream).format("penstock"): into logs and buckets
    lake/      Delta tables, one commit a batch
    decode     payloads into columns, bad ones beside an error
    pipelines/ functions on DataFrames
"""

from penstock.spark.session import register, session

__all__ = ["register", "session"]

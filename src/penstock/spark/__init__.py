"""Floor 8: Spark on every channel.

``session()`` starts a quiet local Spark that knows the format ``penstock``; ``register(spark)`` teaches it to a session
that is there already.  Everything else is in the modules:

    plan       pure: which spans of which channels are read, by whom        source    spark.read.format("penstock")
    columns    what a batch looks like to Spark                             stream
    spark.readStream.format("penstock") decode     payloads into columns, bad ones beside an error
    sinks     write(Stream).format("penstock") lake       Delta tables, one commit a batch
    pipelines/  functions on DataFrames
"""

from penstock.spark.session import register, session

__all__ = ["register", "session"]

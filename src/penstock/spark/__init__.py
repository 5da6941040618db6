"""Floor 8: Spark on every channel.

``session()`` starts a quiet local Spark that knows the format ``penstock``; ``register(spark)`` teaches it to a session
that is there already.  Everything else is in the modules:

    source     spark.read.format("penstock")              decode      payloads into columns, bad ones beside an error
    stream     spark.readStream.format("penstock")        sinks       write(Stream).format("penstock")
    tables/    folds, and the metadata of channels        lake        Delta tables, one commit a batch
    plan       which spans are read, and by whom          columns     what a batch looks like to Spark
    pipelines/ functions on DataFrames
"""

from penstock.spark.session import register, session

__all__ = ["register", "session"]

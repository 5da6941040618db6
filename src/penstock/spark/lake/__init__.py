"""The lake: Delta tables through delta-rs, without a jar.  How each call is used: docs/howto/spark.md."""

from penstock.spark.lake.committed import Ingested as Ingested, ingest_committed as ingest_committed
from penstock.spark.lake.compaction import Compaction as Compaction, join_small_files as join_small_files
from penstock.spark.lake.opening import open_table as open_table
from penstock.spark.lake.reading import read as read, read_added as read_added
from penstock.spark.lake.table import (
    DataFile as DataFile,
    app_of as app_of,
    append as append,
    commit_files as commit_files,
    committed_batch as committed_batch,
    committed_records as committed_records,
    ingest as ingest,
    ingest_once as ingest_once,
    is_due as is_due,
    query_of as query_of,
    replace as replace,
    table_columns as table_columns,
)

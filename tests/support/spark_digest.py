"""Print count and digest of a tree of channels as one Spark sees it: ``python spark_digest.py MASTER PATH…``."""

from __future__ import annotations

import json
import sys

from penstock.spark import session
from penstock.spark.digest import digest_of

if __name__ == "__main__":
    master, *paths = sys.argv[1:]
    spark = session("digest", master=master, memory="1g")
    found = {path: digest_of(spark.read.format("penstock").load(path)) for path in paths}
    spark.stop()
    print(json.dumps({path: [digest.rows, digest.digest] for path, digest in found.items()}))

"""DataFrames into logs and buckets."""

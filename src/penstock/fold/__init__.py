"""Folds: state computed from a bucket or a log, kept in a store together with the cursor it is exact at."""

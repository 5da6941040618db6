"""Folds: state computed from a bucket or a log, kept in a store together with the cursor it is exact at.

>>> from penstock.fold import BatchConfig
>>> BatchConfig().window_seconds
0.01
"""

from penstock.fold.applied import AppliedWatch, watch_applied
from penstock.fold.face import BatchConfig, FoldStore, WatchScope
from penstock.fold.follow import Follow, FollowOptions, each_record, follow

__all__ = [
    "watch_applied",
    "AppliedWatch",
    "WatchScope",
    "BatchConfig",
    "FoldStore",
    "follow",
    "Follow",
    "FollowOptions",
    "each_record",
]

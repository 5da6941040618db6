"""Folds: state computed from a bucket or a log, kept in a store together with the cursor it is exact at."""

from penstock.fold.follow import Follow, FollowOptions, each_record, follow

__all__ = ["follow", "Follow", "FollowOptions", "each_record"]

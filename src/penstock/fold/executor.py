"""Folds reach stores, which are synchronous, through the one bounded executor of the process."""

from __future__ import annotations

from penstock.kv.executor import in_disk_thread as in_store_thread

__all__ = ["in_store_thread"]

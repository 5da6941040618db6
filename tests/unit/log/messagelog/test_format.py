"""What is judged of the bytes of a message log, without a file."""

from __future__ import annotations

import numpy as np

from penstock.log.messagelog.format import INDEX_ENTRY, index_problem


def test_an_index_of_a_segment_without_intact_entries_is_a_problem_and_no_crash() -> None:
    """Another process may have changed the segment between the walk over it and the look at its index."""
    stored = np.zeros(1, INDEX_ENTRY).tobytes()
    assert index_problem(stored, np.zeros(0, INDEX_ENTRY), 4096, 4096) == (0, "there are no entries it could point to")

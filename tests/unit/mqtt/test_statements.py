"""Promise: the page of normative statements lists exactly the tests there are."""

from __future__ import annotations

from mqtt_statements import PAGE, found, table


def test_the_page_of_statements_is_up_to_date() -> None:
    assert PAGE.read_text() == table(), "run: python tests/support/mqtt_statements.py"


def test_statements_are_found_at_all() -> None:
    assert len(found()) > 150

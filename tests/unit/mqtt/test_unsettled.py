"""Promise: spans of packet ids that wait are what one entry for each id would be, whatever comes in which order."""

from __future__ import annotations

from hypothesis import given, strategies as st

from penstock.mqtt.gate import Ticket
from penstock.mqtt.unsettled import Unsettled

spans = st.tuples(st.integers(1, 30), st.integers(1, 8)).map(lambda span: range(span[0], span[0] + span[1]))
steps = st.lists(
    st.tuples(st.sampled_from(["note", "note", "forget", "refused", "done", "refuse"]), spans, st.integers(0, 30)),
    max_size=40,
)


@given(steps)
def test_spans_are_what_one_entry_for_each_id_would_be(history: list[tuple[str, range, int]]) -> None:
    unsettled, by_id = Unsettled(), dict[int, list[Ticket]]()
    tickets: list[Ticket] = [Ticket()]
    for step, ids, which in history:
        ticket = tickets[which % len(tickets)]
        if step == "note":
            tickets.append(Ticket())
            waits = [ticket, tickets[-1]]
            unsettled.note(ids, waits)
            by_id.update(dict.fromkeys(ids, waits))
        elif step == "forget":
            unsettled.forget(ids)
            for each in ids:
                by_id.pop(each, None)
        elif step == "refused":
            freed = unsettled.forget_refused(ids, [ticket])
            wanted = [each for each in ids if ticket in by_id.get(each, ())]
            assert [each for some in freed for each in some] == wanted
            for each in wanted:
                del by_id[each]
        elif step == "done":
            ticket.done()
        else:
            ticket.refuse(0x97)
        for each in range(40):
            told = [one for one in by_id.get(each, ()) if one.open or one.reason]
            assert unsettled.tickets(each) == told
        held = [each for some in unsettled.ids() for each in some]
        assert held == sorted(set(held))
        assert {each for each, waits in by_id.items() if any(one.open or one.reason for one in waits)} <= set(held)


def test_what_is_noted_again_and_again_takes_no_more_room() -> None:
    unsettled, first = Unsettled(), Ticket()
    unsettled.note(range(1, 2), [first])
    for _ in range(1000):
        unsettled.note(range(2, 3), [Ticket()])
    assert (len(unsettled), unsettled.tickets(1)) == (2, [first])
    assert len(unsettled._by_age) < 100

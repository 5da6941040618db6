"""Promise: the server's side of a client keeps to its times and sizes, whatever the reads look like."""

from __future__ import annotations

from penstock.channels.commands import StoredMessage
from penstock.channels.ids import Nid
from penstock.channels.model import Limits
from penstock.channels.wire.frames import decode_line
from penstock.channels.wire.link import ClientLink, LinkState
from penstock.channels.wire.settings import WireSettings

FRAME = b"BROADCAST id=1 channel=!ops@localhost length=1000\n" + b"x" * 1000 + b"\n"


def ready_link(**settings: float) -> ClientLink:
    link = ClientLink(WireSettings(rate_limit=0, **settings), Limits(), now=0.0)  # type: ignore[arg-type]
    link.feed(b"CONNECT version=1\nIDENTIFY username=ann\n", 0.0)
    assert link.next_request(0.0, 0, bool) is not None
    link.logged_in(Nid("ann", "localhost"), 0.0)
    link.take_output()
    return link


def feed(link: ClientLink, data: bytes, now: float) -> int:
    """Feed a read, act on a deadline that has passed, return how many broadcasts were asked."""
    link.feed(data, now)
    count = 0
    while (request := link.next_request(now, 0, bool)) is not None:
        count += len(request.run)
    if link.deadline is not None and link.deadline <= now:
        link.tick(now)
    return count


def test_a_client_whose_reads_all_end_inside_a_payload_has_the_whole_time_for_each() -> None:
    link, now, asked = ready_link(payload_read_timeout=10.0), 0.0, 0
    stream = FRAME * 100
    for start in range(0, len(stream), 700):
        now += 0.5
        asked += feed(link, stream[start : start + 700], now)
    assert (asked, link.state) == (100, LinkState.READY), link.take_output()
    assert now > 60


def test_a_payload_that_trickles_in_has_its_time_from_its_line_on() -> None:
    link = ready_link(payload_read_timeout=10.0)
    feed(link, FRAME + FRAME[:60], 1.0)
    for step in range(1, 10):
        feed(link, b"x", 1.0 + step)
        assert link.state is LinkState.READY
    feed(link, b"x", 11.0)
    assert link.take_output() == [b'ERROR detail=\\"payload read timeout\\" reason=TIMEOUT\n']
    assert link.state is LinkState.ENDED


def test_a_history_that_does_not_fit_the_line_of_a_client_ends_it_as_in_the_original() -> None:
    link = ready_link(max_message_size=200)
    asked = decode_line(b"HISTORY id=1 channel=!ops@localhost from_seq=1 history_id=" + b"h" * 120 + b" limit=9")
    link.answered(asked, [])
    assert link.take_output()[0].startswith(b"HISTORY_ACK id=1 ")
    link.answered(asked, [StoredMessage(1, 1767225600000, "ann@localhost", b"hi")])
    assert (link.take_output(), link.state) == ([], LinkState.ENDED)


def test_output_is_taken_in_pieces_and_what_is_left_is_counted() -> None:
    link = ready_link()
    for number in range(5):
        link.send(b"%d" % number * 100, 2)
    assert (link.take_output(150), link.waiting, link.has_output) == ([b"0" * 100, b"1" * 100], 6, True)
    link.send(b"x", 1)
    assert (link.take_output(1), link.waiting) == ([b"2" * 100], 5)
    assert (link.take_output(1000), link.waiting, link.has_output) == ([b"3" * 100, b"4" * 100, b"x"], 0, False)

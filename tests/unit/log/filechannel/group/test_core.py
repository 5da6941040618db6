"""The deciding part of a group, without files and clocks."""

from __future__ import annotations

from penstock.log.filechannel.group.core import GroupCore
from penstock.log.filechannel.group.format import Unfinished


def take(
    core: GroupCore, positions: list[int], after: int, now: float, worker: str = "ann", lease: float = 10
) -> list[Unfinished]:
    return core.take(positions, after, worker, now, round(now * 1e9), lease)


def test_a_message_in_work_is_not_picked_before_its_lease_ends() -> None:
    core = GroupCore(0)
    take(core, [0, 10], 20, now=0)
    assert core.overdue(9.9) == []
    assert core.pick(9.9, 5) == []
    assert core.overdue(10.0) == [0, 10]
    core.release([0, 10])
    assert core.pick(10.0, 5) == [0, 10]


def test_a_renewed_lease_ends_later() -> None:
    core = GroupCore(0)
    (entry,) = take(core, [0], 10, now=0)
    assert core.renew({0: entry.token}, now=9, seconds=10) == []
    assert core.overdue(18.9) == []
    assert core.overdue(19.0) == [0]


def test_a_lease_that_went_to_another_worker_settles_nothing() -> None:
    core = GroupCore(0)
    (old,) = take(core, [0], 10, now=0)
    core.release(core.overdue(11))
    (new,) = take(core, core.pick(11, 1), 10, now=11, worker="bob")
    assert new.tries == 2
    for settle in (
        core.finish({0: old.token}),
        core.fail({0: old.token}, 12, 0, 0, "late"),
        core.renew({0: old.token}, 12, 10),
    ):
        assert settle == [0]
    assert core.entries[0].worker == "bob"
    assert core.finish({0: new.token}) == []


def test_a_late_ack_counts_while_nobody_else_has_the_message() -> None:
    core = GroupCore(0)
    (entry,) = take(core, [0], 10, now=0)
    core.release(core.overdue(11))
    assert core.finish({0: entry.token}) == []
    assert core.floor == 10
    assert core.pick(12, 1) == []


def test_acks_out_of_order_move_the_floor_to_the_first_unfinished() -> None:
    core = GroupCore(0)
    entries = take(core, [0, 10, 20], 30, now=0)
    core.finish({20: entries[2].token})
    core.finish({0: entries[0].token})
    assert core.floor == 10
    core.finish({10: entries[1].token})
    assert core.floor == 30


def test_a_failed_message_waits_for_its_delay_and_others_go_before_it() -> None:
    core = GroupCore(0)
    entries = take(core, [0, 10], 20, now=0)
    core.fail({0: entries[0].token}, now=1, now_ns=0, delay=5, reason="no")
    core.fail({10: entries[1].token}, now=1, now_ns=0, delay=0, reason="no")
    assert core.pick(1, 5) == [10]
    assert core.due(1) == 5.0
    assert core.pick(6, 5) == [0]


def test_messages_of_one_key_go_one_at_a_time_in_their_order() -> None:
    core = GroupCore(0, ordered=True)
    core.see([0, 10, 20, 30], [b"a", b"a", b"b", None], 40)
    assert core.pick(0, 9) == [0, 20, 30]
    a, b, _ = take(core, [0, 20, 30], 40, now=0)
    assert core.pick(1, 9) == []
    core.fail({0: a.token}, now=1, now_ns=0, delay=5, reason="no")
    assert core.pick(5, 9) == []  # the second of its key waits as well
    assert core.pick(6, 9) == [0]
    (a,) = take(core, [0], 40, now=6)
    core.finish({0: a.token})
    assert core.pick(6, 9) == [10]
    assert core.finish({20: b.token}) == []


def test_an_order_of_keys_lasts_through_a_snapshot() -> None:
    core = GroupCore(0, ordered=True)
    core.see([0, 10, 20], [b"a", b"a", b"b"], 30)
    again = GroupCore.restore(core.snapshot(bytes(16), bytes(16)))
    assert again.pick(0, 9) == [0, 20]


def test_after_a_restart_of_the_machine_leases_are_over_and_delays_go_by_the_wall_clock() -> None:
    core = GroupCore(0)
    entries = take(core, [0, 10], 20, now=1000)
    core.fail({10: entries[1].token}, now=1000, now_ns=50_000_000_000, delay=60, reason="no")
    core.start_again(now=3.0, now_ns=90_000_000_000)  # 40 s later by the calendar, and another monotonic clock
    assert core.pick(3.0, 9) == [0]
    assert core.due(3.0) == 20.0


def test_a_calendar_that_was_set_back_keeps_no_message_longer_than_its_delay() -> None:
    core = GroupCore(0)
    (entry,) = take(core, [0], 10, now=1000)
    core.fail({0: entry.token}, now=1000, now_ns=10**18, delay=60, reason="no")
    core.start_again(now=0.0, now_ns=0)
    assert core.due(0.0) == 60.0


def test_a_queue_that_lost_its_end_takes_the_positions_back() -> None:
    core = GroupCore(0, ordered=True)
    core.see([0, 10, 20], [b"a", b"a", b"b"], 30)
    core.cut(10)
    assert (core.next, list(core.entries)) == (10, [0])
    core.see([10], [b"a"], 18)
    assert core.pick(0, 9) == [0]


def test_events_bring_another_process_to_the_same_state() -> None:
    core, other = GroupCore(0), GroupCore(0)
    entries = take(core, [0, 10, 20], 30, now=0)
    core.fail({0: entries[0].token}, 1, 7, 5, "no")
    core.finish({10: entries[1].token})
    core.renew({20: entries[2].token}, 2, 10)
    core.release(core.overdue(20))
    for event in core.drain():
        other.apply(event)
    assert other.snapshot(b"", b"") == core.snapshot(b"", b"")
    assert core.drain() == []


def held_objects(core: GroupCore) -> int:
    """How many containers and numbers a core holds on to."""
    return sum(len(part) for part in vars(core).values() if isinstance(part, (list, dict)))


def test_what_is_finished_is_forgotten_long_before_its_lease_would_have_ended() -> None:
    core = GroupCore(0)
    (stuck,) = take(core, [0], 1, now=0, lease=3600)
    for number in range(1, 20_001):
        (entry,) = take(core, [number], number + 1, now=number / 1000, lease=3600)
        if number % 3 == 0:
            core.fail({number: entry.token}, now=number / 1000, now_ns=0, delay=3000.0, reason="not now")
            core.finish({number: entry.token})
        else:
            core.finish({number: entry.token})
        core.drain()
    assert (core.floor, list(core.entries)) == (0, [0])
    assert held_objects(core) < 2000
    assert core.overdue(3600.0) == [0]
    core.finish({0: stuck.token})
    assert core.floor == 20_001


def test_messages_are_handed_out_as_before_when_old_items_were_dropped() -> None:
    core = GroupCore(0)
    leases = {entry.position: entry for entry in take(core, list(range(1000)), 1000, now=0, lease=100)}
    later = [position for position in leases if position % 10 == 0]
    core.fail({p: leases[p].token for p in later}, now=1, now_ns=0, delay=5.0, reason="not now")
    core.finish({p: leases[p].token for p in leases if p % 10 and p % 10 != 5})
    for turn in range(2000):  # a message that comes and goes makes old items of each kind
        (entry,) = take(core, [1000 + turn], 1001 + turn, now=2, lease=100)
        core.finish({entry.position: entry.token})
    assert core.pick(5.9, 1000) == []
    assert core.pick(6.0, 1000) == later
    assert core.overdue(99.9) == []
    assert core.overdue(100.0) == [position for position in leases if position % 10 == 5]

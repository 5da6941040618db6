"""Promise: many deadlines share one timer, and nobody is looked at who need not be."""

from __future__ import annotations

from hypothesis import given, strategies as st

from penstock.net.deadlines import SLOT_SECONDS, Slots

TIMES = st.integers(0, 640).map(lambda number: number / 32)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), TIMES),
        st.tuples(st.just("discard"), st.integers(0, 5), st.just(0.0)),
        st.tuples(st.just("take"), st.just(0), TIMES),
    )
)


@given(ACTIONS)
def test_slots_match_the_reference_model(actions: list[tuple[str, int, float]]) -> None:
    slots: Slots[int] = Slots()
    model: dict[int, float] = {}
    for word, item, time in actions:
        if word == "put":
            slots.put(item, time)
            model[item] = time
        elif word == "discard":
            slots.discard(item)
            model.pop(item, None)
        else:
            taken = slots.take(time)
            assert all(model[item] <= time for item in taken)
            assert all(model[item] + SLOT_SECONDS > time for item in model.keys() - taken)
            for item in taken:
                del model[item]
        assert len(slots) == len(model)
        following = slots.next
        if model:
            assert following is not None
            assert min(model.values()) <= following < min(model.values()) + SLOT_SECONDS
        else:
            assert following is None


def test_nothing_is_left_behind_by_items_that_move() -> None:
    slots: Slots[int] = Slots()
    for time in range(10_000):
        slots.put(1, float(time))
        assert slots.next == float(time)
    assert len(slots._slots) == len(slots._heap) == 1

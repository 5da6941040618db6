"""What a reader does when its walk stops: wait, go on where the channel has grown, or say what is wrong.

Every error leaves the reader where it is, so the next call meets the same thing, or goes on if it was mended.
"""

from __future__ import annotations

import time
from typing import Final

from penstock.errors import CorruptionError, ExpiredError, PenstockError, ReplacedError
from penstock.log.xchannel.files import SECOND_LOOK_SECONDS, ChannelFile, discover, problem_at, written_behind
from penstock.log.xchannel.format import FIRST_SLOT, RecordStop, file_path, position_of, split_position
from penstock.log.xchannel.place import Place
from penstock.log.xchannel.recover import is_older, lost_roll, mark_ahead
from penstock.types import Problem

__all__ = ["move_on", "skip_damage"]

CHECK_NANOSECONDS: Final = 5_000_000  # how often a waiting reader looks beyond its slot


def move_on(place: Place) -> bool:
    """Deal with what the walk stopped at: True to walk on, False when there is nothing more yet."""
    with place.lock:
        place.check_open()
        if place.cursor.ready():  # another thread was here, or the writer
            return True
        file, stop = place.file, RecordStop(place.cursor.status)
        if place.bound is not None and place.cursor.position >= place.bound:
            return _lift_bound(place)
        match stop:
            case RecordStop.TAIL:
                return _look_around(place, file)
            case RecordStop.END | RecordStop.TRUNCATED:
                return _grow(place, file, stop)
            case RecordStop.ROLLED:
                false_roll = written_behind(file, place.cursor, 2)
                if false_roll is not None:
                    raise false_roll
                place.enter(_next_file(place, file), FIRST_SLOT)
                return True
            case _:
                return _look_twice(place, file, stop)


def skip_damage(place: Place) -> Problem | None:
    """Step over a damaged place to the next region or file; return what was stepped over, None if nothing is wrong."""
    with place.lock:
        try:
            move_on(place)
        except CorruptionError as exc:
            file = place.file
            following = (place.offset // file.region_bytes + 1) * file.region_bytes
            at_end = place.cursor.status in (RecordStop.TAIL, RecordStop.ROLLED)
            if at_end and file.file.read_at(following, 1) != b"\1":
                place.enter(_next_file(place, file), FIRST_SLOT)  # nothing more is in this one
            elif following + FIRST_SLOT <= file.size:
                place.enter(file, following)
            else:
                place.enter(_next_file(place, file), FIRST_SLOT)
            return Problem(exc.file, exc.byte, exc.reason)
        return None


def _grow(place: Place, file: ChannelFile, stop: RecordStop) -> bool:
    """Walk on into what the file has gained, or say that it ends too soon."""
    cursor = place.cursor
    start = cursor.window_position - file.position(0)
    offset, size = start + cursor.at, file.size
    if stop is RecordStop.END and size > offset and offset - start >= len(cursor.window):
        place.enter(file, offset)
        return True
    reach = min(size - start, len(cursor.window))
    if reach > cursor.stop:
        cursor.extend(reach)
        return True
    raise problem_at(file, offset, stop)


def _look_twice(place: Place, file: ChannelFile, stop: RecordStop) -> bool:
    """Report damage, unless it was the moment between a commit and the header behind it.

    xchannel 2.0.0 lays that header after the commit: what a reader meets there meanwhile may be
    left over from a longer reservation.
    """
    time.sleep(SECOND_LOOK_SECONDS)
    if place.cursor.ready() or place.cursor.status != stop:
        return True
    raise problem_at(file, place.offset, stop)


def _look_around(place: Place, file: ChannelFile) -> bool:
    """At the tail: now and then, see whether the file is still the one to wait at.

    In between the cursor rests, which makes polling cheap: it asks for no lock and knows all it takes to decide.
    """
    if place.cursor.resting():
        return False
    if file.size <= place.offset:
        raise CorruptionError(file.path, file.size, "the file was cut while it was read")
    if file.size % file.region_bytes:
        raise problem_at(file, place.offset, RecordStop.LIMIT)
    if _is_unfinished(place, file):
        return True
    if _missed_roll(place, file):
        return True
    _check_mark(place, file)
    here = place.disk.stat(file.path)
    if here is not None and here.identity == file.file.stat().identity:
        place.cursor.rest(CHECK_NANOSECONDS)  # only now: what is wrong is told every time
        return False
    if place.cursor.ready() or place.cursor.status != RecordStop.TAIL:
        return True  # it was rolled and then removed by retention
    raise ReplacedError(
        place.path,
        "its files are gone" if here is None else "another file has taken the place of its newest",
    )


def _is_unfinished(place: Place, file: ChannelFile) -> bool:
    """Raise where a commit byte was lost in the middle; True if the writer has just gone on."""
    if place.bound is not None:
        return False  # after a power cut nothing behind the mark means anything
    found = written_behind(file, place.cursor)
    if found is not None and place.disk.stat(file_path(place.path, file.sequence + 1)) is not None:
        found = written_behind(file, place.cursor, 2)
    if found is not None:
        raise found
    return place.cursor.status != RecordStop.TAIL or place.cursor.ready()


def _check_mark(place: Place, file: ChannelFile) -> None:
    """Once at the end of a channel: say if that lies before the durable mark, so that files are missing or older."""
    if place.checked:
        return
    mark = None if place.bound is not None else place.sidecar.durable_position()
    if mark is not None and mark > place.cursor.position and not place.cursor.ready():
        if place.cursor.status == RecordStop.TAIL and mark > place.cursor.position:
            raise mark_ahead(file, place.offset, mark, place.sidecar)
        return
    place.checked = True


def _missed_roll(place: Place, file: ChannelFile) -> bool:
    """Whether the writer died between using the next file and committing the Roll to it.

    A writer commits the Roll before the first record of the new file, so a record there that
    this file's slot does not account for means that the Roll was lost.  The sequence in the header
    tells a successor from a channel of its own that happens to have the name.
    """
    if place.disk.stat(file_path(place.path, file.sequence + 1)) is None:
        return False
    try:
        successor = ChannelFile.open(place.disk, place.path, file.sequence + 1)
    except (OSError, PenstockError):
        return False  # half made: whoever follows the Roll says so
    begun = (
        successor.header.sequence == successor.sequence
        and successor.region_bytes == file.region_bytes
        and successor.file.read_at(FIRST_SLOT, 1) == b"\1"
    )
    if not begun or place.cursor.ready() or place.cursor.status != RecordStop.TAIL:
        successor.close()
        return begun and place.cursor.status != RecordStop.TAIL
    if is_older(file, place.offset, place.sidecar):
        successor.close()
        raise lost_roll(file, place.offset)
    place.enter(successor, FIRST_SLOT)
    return True


def _next_file(place: Place, file: ChannelFile) -> ChannelFile:
    """Open the file a Roll leads to."""
    identity = place.sidecar.identity()
    if place.log_id is not None and (identity is None or identity.log_id != place.log_id):
        raise ReplacedError(place.path, "its log id changed")
    following = file.sequence + 1
    try:
        successor = ChannelFile.open(place.disk, place.path, following)
    except FileNotFoundError:
        sequences = discover(place.disk, place.path)
        if not sequences:
            raise ReplacedError(place.path, "its files are gone") from None
        if sequences[0] > following:
            lost, first = (position_of(n, FIRST_SLOT) for n in (following, sequences[0]))
            raise ExpiredError(place.path, lost, first) from None
        raise CorruptionError(
            file_path(place.path, following),
            0,
            f"missing, though {file.path} ends with a Roll to it",
        ) from None
    if successor.region_bytes != file.region_bytes:
        successor.close()
        raise CorruptionError(
            successor.path,
            40,
            f"region_size is {successor.region_bytes}, but the channel's is {file.region_bytes}",
        )
    return successor


def _lift_bound(place: Place) -> bool:
    """Go past the mark of an earlier boot once a writer has cleaned up behind it."""
    place.load_power_loss_bound()
    if place.bound is not None:
        return False
    sequence, offset = split_position(place.cursor.position)
    place.enter(ChannelFile.open(place.disk, place.path, sequence), offset)
    return True

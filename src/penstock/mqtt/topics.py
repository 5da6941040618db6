"""Topic names and filters: what is allowed, what matches, and two trees that find matches without trying all.

A tree has one node a level.  ``FilterTree`` holds filters and finds those that match a topic; ``TopicTree`` holds
topics and finds those that a filter matches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["FilterTree", "TopicTree", "is_filter", "is_topic", "matches", "split_share"]

T = TypeVar("T")


def is_filter(text: str) -> bool:
    """Whether wildcards stand where they may: ``+`` fills a level, ``#`` is the last one (MQTT 4.7.1).

    >>> [is_filter(each) for each in ("a/+/b", "#", "a/#", "a+", "a/#/b", "")]
    [True, True, True, False, False, False]
    """
    if not text or len(text.encode()) > 65535 or "\0" in text:
        return False
    if "+" not in text and "#" not in text:
        return True
    levels = text.split("/")
    if any(("+" in level and level != "+") or ("#" in level and level != "#") for level in levels):
        return False
    return "#" not in levels[:-1]


def is_topic(text: str) -> bool:
    """Whether messages may be published to it.

    >>> [is_topic(each) for each in ("a/b", "/", "a/#", "+", "")]
    [True, True, False, False, False]
    """
    return bool(text) and not any(each in text for each in "+#\0") and len(text.encode()) <= 65535


def split_share(text: str) -> tuple[str | None, str]:
    """Return (group, filter); the group is None without ``$share/``, and empty when its name is not allowed.

    >>> split_share("$share/workers/jobs/#"), split_share("jobs/#"), split_share("$share/a+/x"), split_share("$share/g")
    (('workers', 'jobs/#'), (None, 'jobs/#'), ('', 'x'), ('', ''))
    """
    if not text.startswith("$share/"):
        return ("", "") if text == "$share" else (None, text)
    group, _, rest = text[7:].partition("/")
    if not rest or "+" in group or "#" in group:
        return "", rest
    return group, rest


def matches(filter: str, topic: str) -> bool:
    """Whether the filter matches the topic; wildcards at the start do not match a leading ``$`` (MQTT-4.7.2-1).

    >>> matches("a/#", "a"), matches("+/b", "/b"), matches("#", "$SYS/x"), matches("$SYS/#", "$SYS/x")
    (True, True, False, True)
    """
    if topic[:1] == "$" and filter[:1] in ("+", "#"):
        return False
    return levels_match(filter.split("/"), topic.split("/"))


def levels_match(wanted: list[str], levels: list[str]) -> bool:
    """Whether the levels of a filter match those of a topic; the rule about ``$`` is for the caller."""
    if wanted[-1] == "#":
        if len(levels) < len(wanted) - 1:
            return False
        wanted = wanted[:-1]
    elif len(wanted) != len(levels):
        return False
    return all(a in (b, "+") for a, b in zip(wanted, levels, strict=False))


class _Node(Generic[T]):
    __slots__ = ("children", "deep", "own")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.own: dict[Hashable, T] = {}
        self.deep: dict[Hashable, T] = {}  # of filters that end in "#" below this level


class FilterTree(Generic[T]):
    """Filters, each with a value for every key that holds it.

    >>> tree: FilterTree[int] = FilterTree()
    >>> tree.put("a/+", "ann", 1); tree.put("#", "bob", 2); tree.put("a/#", "ann", 3)
    >>> sorted(tree.match("a/b")), tree.match("$a/b"), len(tree)
    ([1, 2, 3], [], 3)
    >>> tree.remove("#", "bob"); tree.match("x")
    []
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, filter: str, key: Hashable, value: T) -> None:
        """Add or replace the value of a key under a filter."""
        node, deep = self._root, False
        for level in filter.split("/"):
            if level == "#":
                deep = True
                break
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        values = node.deep if deep else node.own
        self._size += key not in values
        values[key] = value

    def get(self, filter: str, key: Hashable) -> T | None:
        """Return the value of a key under exactly this filter."""
        node: _Node[T] | None = self._root
        for level in filter.split("/"):
            if level == "#":
                return node.deep.get(key) if node is not None else None
            node = node.children.get(level) if node is not None else None
        return node.own.get(key) if node is not None else None

    def remove(self, filter: str, key: Hashable) -> None:
        """Take a key away from a filter; levels that hold nothing any more go with it."""
        path: list[tuple[_Node[T], str]] = []
        node, deep = self._root, False
        for level in filter.split("/"):
            if level == "#":
                deep = True
                break
            child = node.children.get(level)
            if child is None:
                return
            path.append((node, level))
            node = child
        values = node.deep if deep else node.own
        if values.pop(key, None) is None:
            return
        self._size -= 1
        for parent, level in reversed(path):
            child = parent.children[level]
            if child.children or child.own or child.deep:
                break
            del parent.children[level]

    def match(self, topic: str) -> list[T]:
        """Return the values of every filter that matches the topic."""
        found: list[T] = []
        nodes = [self._root]
        wild = topic[:1] != "$"
        for level in topic.split("/"):
            below = []
            for node in nodes:
                if wild and node.deep:
                    found += node.deep.values()
                child = node.children.get(level)
                if child is not None:
                    below.append(child)
                if wild:
                    child = node.children.get("+")
                    if child is not None:
                        below.append(child)
            if not below:
                return found
            nodes, wild = below, True
        for node in nodes:
            found += node.own.values()
            found += node.deep.values()
        return found


class _Topic(Generic[T]):
    __slots__ = ("children", "value")

    def __init__(self) -> None:
        self.children: dict[str, _Topic[T]] = {}
        self.value: T | None = None


class TopicTree(Generic[T]):
    """Topics, each with one value; a filter finds those it matches, in the order of the tree.

    >>> tree: TopicTree[int] = TopicTree()
    >>> tree.put("a/b", 1); tree.put("a", 2); tree.put("$SYS/x", 3); tree.put("c/b", 4)
    >>> list(tree.match("a/#")), list(tree.match("+/b")), list(tree.match("#")), list(tree.match("$SYS/#"))
    ([2, 1], [1, 4], [2, 1, 4], [3])
    """

    def __init__(self) -> None:
        self._root: _Topic[T] = _Topic()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, topic: str, value: T) -> None:
        """Set the value of a topic."""
        node = self._root
        for level in topic.split("/"):
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Topic()
            node = child
        self._size += node.value is None
        node.value = value

    def get(self, topic: str) -> T | None:
        """Return the value of a topic."""
        node = self._root
        for level in topic.split("/"):
            child = node.children.get(level)
            if child is None:
                return None
            node = child
        return node.value

    def remove(self, topic: str) -> T | None:
        """Take a topic away and return its value."""
        path: list[tuple[_Topic[T], str]] = []
        node = self._root
        for level in topic.split("/"):
            child = node.children.get(level)
            if child is None:
                return None
            path.append((node, level))
            node = child
        value, node.value = node.value, None
        self._size -= value is not None
        for parent, level in reversed(path):
            child = parent.children[level]
            if child.children or child.value is not None:
                break
            del parent.children[level]
        return value

    def match(self, filter: str) -> Iterator[T]:
        """Yield the values of the topics that the filter matches.  The tree must not change meanwhile."""
        wanted = filter.split("/")
        stack: list[tuple[_Topic[T], int]] = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            if depth == len(wanted):
                if node.value is not None:
                    yield node.value
                continue
            level = wanted[depth]
            if level == "#":
                if node.value is not None:
                    yield node.value
                stack += [(child, depth) for name, child in reversed(node.children.items()) if depth or name[:1] != "$"]
                if depth == 0:  # below the first level a "$" is like any other
                    wanted, stack = ["", "#"], [(child, 1) for child, _ in stack]
            elif level == "+":
                stack += [
                    (child, depth + 1) for name, child in reversed(node.children.items()) if depth or name[:1] != "$"
                ]
            else:
                below = node.children.get(level)
                if below is not None:
                    stack.append((below, depth + 1))

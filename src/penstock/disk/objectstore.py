"""Object stores: a small face over obstore, and what a URL means.

What is written here is immutable (a payload, a segment: ``put``) or small and swapped (a pointer, a manifest:
``create`` and ``swap``).  ``publish`` is how something small is swapped: a conditional put that failed says nothing
about whether it was done (the library may have retried and met its own write), so the object is read back and its
bytes are compared.

Credentials come from where they usually do: ``AWS_*``, ``GOOGLE_*``, ``AZURE_*``.  Plain http to a public address is
refused unless asked for.  A process that was forked after its parent made a request cannot make any: it is told so
instead of hanging.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.disk.threads import interruptible
from penstock.errors import (
    AlreadyExists,
    ClosedError,
    ConflictError,
    NotFoundError,
    OptionsError,
    PenstockError,
    RetryError,
    RevisionMismatch,
    UnsupportedError,
)

__all__ = ["ObjectStore", "ObjectInfo", "ObjectOptions", "Tag", "Obstore", "publish", "split_url", "check_conditions"]

_log = logging.getLogger("penstock.disk")

SCHEMES: Final = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory", "file")
ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "a": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Which variables give the address of a store, by the scheme of its URL; the first that is set is taken."""

ADDRESS: Final = re.compile(r"https?://[^\s/?#]+\S*", re.IGNORECASE)
USER: Final = re.compile(r"(\w://)[^/\s@]*@")
QUERY: Final = re.compile(r"(\w://[^\s?]*)\?[^\s)]*")
NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
"""How stores say that a bucket is missing, where the library has no class for it: when it is listed."""
CODE: Final = re.compile(r"<Code>([\w.-]{1,80})</Code>")
MESSAGE: Final = re.compile(r"<Message>([^<\n]{1,300})")
"""Why a store refuses, in what it answers; the rest may repeat keys."""
SKEWED: Final = "<Code>RequestTimeTooSkewed</Code>"
DENIED: Final = ("status code: 403 ", "status code: 401 ")
"""How the library says that access was denied where it has no class for it: of a listing."""
METADATA: Final = "169.254.169.254"
"""Where the library asks when the environment has no credentials."""
CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS is",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY are",
}
"""What usually has them, by the scheme of a URL."""


class _Requests:
    """Whether this process made any, and whether a parent of it did."""

    made = False
    lost = False

    @classmethod
    def forked(cls) -> None:
        cls.lost = cls.made


os.register_at_fork(after_in_child=_Requests.forked)


class Tag(msgspec.Struct, frozen=True):
    """Which version of an object: what a later ``swap`` compares with.

    >>> Tag("abc").as_mode()
    {'e_tag': 'abc'}
    """

    e_tag: str | None = None
    version: str | None = None

    def as_mode(self) -> dict[str, str]:
        """Return what the library wants; it takes no None."""
        return {name: value for name in ("e_tag", "version") if (value := getattr(self, name)) is not None}


class ObjectInfo(msgspec.Struct, frozen=True):
    """What a store knows of an object.

    >>> ObjectInfo("a/b", 3, 0).size
    3
    """

    key: str
    size: int
    modified_ns: int
    tag: Tag = Tag()


class ObjectStore(Protocol):
    """Objects by key, all below one URL.  Every method may be called from any thread.

    A key that is not there is a FileNotFoundError; a store that does not answer is a RetryError.
    """

    url: str
    puts_at_once: int
    """How many puts side by side are worth it: they hide how long a network takes, or a disk to sync."""

    def get(self, key: str, *, most: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Return an object whole, UnsupportedError when it has more than ``most`` bytes."""

    def get_range(self, key: str, start: int, end: int, tag: Tag | None = None) -> Any:
        """Return some bytes, all of them there; with a ``tag`` RevisionMismatch when the object changed."""

    def stream(self, key: str, chunk_bytes: int = 8 << 20) -> Iterator[Any]:
        """Yield an object piece by piece; never a splice of two versions."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, None when it is not there."""

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below a prefix, which means whole parts of a path."""

    def folder(self, prefix: str = "") -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of folders right below a prefix, and the objects there."""

    def put(self, key: str, data: bytes | Iterable[Any]) -> None:
        """Write an object, whatever is there; pieces go up as they come."""

    def create(self, key: str, data: bytes) -> Tag:
        """Write an object that is not there; AlreadyExists otherwise.  Any other error leaves it open: ``publish``."""

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        """Write an object that is still this version; RevisionMismatch otherwise, UnsupportedError where it cannot."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """How a store is talked to.

    >>> ObjectOptions(part_bytes=1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: part_bytes=1: stores take parts of 5 MiB and more
    """

    allow_http: bool = False
    """Whether plain http may go to an address that is not of this machine or a private network."""

    part_bytes: int = 8 << 20
    """Objects longer than this go up in parts of this size."""

    parts_at_once: int = 8
    """How many parts go up side by side.  On a slow link 1: each part has ``timeout_seconds``."""

    timeout_seconds: float = 120.0
    """How long one request may take, its body included; a part must fit in it."""

    connect_seconds: float = 5.0
    """How long a connection may take."""

    retry_seconds: float = 60.0
    """How long a request is tried again before RetryError."""

    config: dict[str, Any] = field(default_factory=dict)
    """What else obstore takes for this kind of store: ``aws_region``, ``conditional_put``, …"""

    def __post_init__(self) -> None:
        if self.part_bytes < 5 << 20:
            raise OptionsError(f"part_bytes={self.part_bytes}: stores take parts of 5 MiB and more")
        if self.parts_at_once < 1:
            raise OptionsError(f"parts_at_once={self.parts_at_once}: must be at least 1")


def split_url(url: str) -> tuple[str, str]:
    """Return the root of a URL (scheme and bucket) and the path below it, without slashes at its ends.

    >>> split_url("s3://bucket/fleet/ticks/")
    ('s3://bucket', 'fleet/ticks')
    >>> split_url("memory://mine/a")
    ('memory://mine', 'a')
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() not in SCHEMES:
        raise UnsupportedError(f"{url}: objects are at one of {', '.join(name + '://' for name in SCHEMES)}")
    host, _, path = rest.partition("/")
    user, at, bucket = host.rpartition("@")
    if at and (":" in user or not scheme.lower().startswith("ab")):  # abfss://container@account is how Azure has it
        raise OptionsError(
            f"{scheme}://{bucket}: a user or password in a URL ends up in logs; credentials come from the environment"
        )
    if scheme.lower() == "file":
        if host not in ("", "localhost"):
            raise OptionsError(f"{url}: a file:// URL has three slashes and a path of this machine")
        return "file://", unquote(path).strip("/")
    if not host and scheme.lower() != "memory":
        raise OptionsError(f"{url}: there is no bucket in it")
    return f"{scheme.lower()}://{host}", path.strip("/")


class Obstore:
    """Any store of obstore.  ``prefix`` is put in front of every key.

    >>> from obstore.store import MemoryStore
    >>> store = Obstore(MemoryStore(), "memory://")
    >>> store.put("a/b", b"hello"); store.get("a/b")[0]
    b'hello'
    >>> tag = store.create("c", b"1")
    >>> store.create("c", b"2")
    Traceback (most recent call last):
    penstock.errors.AlreadyExists: memory:///c exists
    """

    puts_at_once = 4

    def __init__(self, store: Any, url: str, prefix: str = "", options: ObjectOptions | None = None) -> None:
        self._store, self._prefix = store, prefix + "/" if prefix else ""
        self.url, self.options = url, options or ObjectOptions()

    def below(self, prefix: str) -> Obstore:
        """Return the part of this store below a prefix."""
        return Obstore(self._store, f"{self.url}/{prefix}", self._prefix + prefix, self.options)

    def get(self, key: str, *, most: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Return an object whole."""
        with self._asking(key):
            result = interruptible(lambda: self._store.get(self._prefix + key))
            info = self._info(result.meta)
            if most is not None and info.size > most:
                raise UnsupportedError(f"{self.url}/{key}: {info.size} bytes, where {most} are the most")
            return bytes(interruptible(result.bytes)), info

    def get_range(self, key: str, start: int, end: int, tag: Tag | None = None) -> Any:
        """Return some bytes."""
        options: dict[str, Any] = {"range": (start, end)}
        if tag is not None and tag.e_tag is not None:
            options["if_match"] = tag.e_tag
        with self._asking(key):
            return interruptible(lambda: self._store.get(self._prefix + key, options=options).bytes())

    def stream(self, key: str, chunk_bytes: int = 8 << 20) -> Iterator[Any]:
        """Yield an object piece by piece."""
        with self._asking(key):
            pieces = iter(interruptible(lambda: self._store.get(self._prefix + key)).stream(min_chunk_size=chunk_bytes))
            while (piece := interruptible(lambda: next(pieces, None))) is not None:
                yield piece

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object."""
        try:
            with self._asking(key):
                return self._info(interruptible(lambda: self._store.head(self._prefix + key)))
        except FileNotFoundError:
            return None

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below a prefix."""
        with self._asking(prefix):
            listed = iter(self._store.list((self._prefix + prefix).strip("/") or None))
            while (some := interruptible(lambda: next(listed, None))) is not None:
                yield from map(self._info, some)

    def folder(self, prefix: str = "") -> tuple[list[str], list[ObjectInfo]]:
        """Return what is right below a prefix."""
        with self._asking(prefix):
            start = (self._prefix + prefix).strip("/") or None
            found = interruptible(lambda: self._store.list_with_delimiter(start))
            names = [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
            return names, [self._info(meta) for meta in found["objects"]]

    def put(self, key: str, data: bytes | Iterable[Any]) -> None:
        """Write an object."""
        part, at_once = self.options.part_bytes, self.options.parts_at_once
        try:
            with self._asking(key):
                self._store.put(self._prefix + key, data, chunk_size=part, max_concurrency=at_once)
        except FileNotFoundError:
            raise NotFoundError(f"{self.url}: there is no such bucket: nothing can be put there") from None

    def create(self, key: str, data: bytes) -> Tag:
        """Write an object that is not there."""
        return self._conditional(key, data, "create")

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        """Write an object that is still this version."""
        if not tag.as_mode():
            raise UnsupportedError(f"{self.url}: this store gives objects no tag to compare with")
        return self._conditional(key, data, tag.as_mode())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        names = [self._prefix + key for key in keys]
        if not names:
            return
        try:
            with self._asking(names[0]):
                self._store.delete(names)
        except FileNotFoundError:
            for name in names:  # this kind of store minds: the others must go all the same
                with contextlib.suppress(FileNotFoundError), self._asking(name):
                    self._store.delete(name)

    def _conditional(self, key: str, data: bytes, mode: Any) -> Tag:
        with self._asking(key):
            done = self._store.put(self._prefix + key, data, mode=mode)
            return Tag(done.get("e_tag"), done.get("version"))

    def _info(self, meta: Any) -> ObjectInfo:
        modified: dt.datetime = meta["last_modified"]
        since = modified - dt.datetime.fromtimestamp(0, dt.UTC)
        name = str(meta["path"]).removeprefix(self._prefix)
        tag = Tag(meta.get("e_tag"), meta.get("version"))
        return ObjectInfo(name, int(meta["size"]), since // dt.timedelta(microseconds=1) * 1000, tag)

    @contextlib.contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Translate what the library raises; one line of it is enough."""
        if _Requests.lost:
            raise ClosedError(f"{self.url}: this process was forked after a request was made; start it by spawn")
        _Requests.made = True
        where = f"{self.url}/{key}"
        try:
            yield
        except (PenstockError, OptionsError):
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", where) from None
        except (NotImplementedError, TypeError) as exc:
            raise UnsupportedError(f"{where}: {_line(exc)}") from None
        except ValueError as exc:
            raise OptionsError(f"{where}: {_line(exc)}") from None
        except Exception as exc:  # noqa: BLE001 - the library's classes are sorted below
            raise _sorted(exc, where) from None
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":
                raise
            raise UnsupportedError(f"{where}: the library for object stores panicked: {_line(exc)}") from None


def _sorted(exc: Exception, where: str) -> Exception:
    from obstore import exceptions

    if not isinstance(exc, exceptions.BaseError):
        return exc
    if isinstance(exc, exceptions.AlreadyExistsError):
        return AlreadyExists(f"{where} exists")
    if isinstance(exc, exceptions.PreconditionError):
        return RevisionMismatch(f"{where} has changed")
    if isinstance(exc, exceptions.NotSupportedError):
        return UnsupportedError(f"{where}: {_line(exc)}")
    if SKEWED in str(exc):  # clocks are set while machines run
        return RetryError(f"{where}: the clock of this machine is wrong: {_line(exc)}")
    denied = isinstance(exc, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
    if denied or any(said in str(exc) for said in DENIED):
        return OptionsError(f"{where}: access denied: {_line(exc)}")
    if any(said in str(exc) for said in NO_BUCKET):
        return OptionsError(f"{where}: there is no such bucket")  # and not "nothing is there": that may be waited for
    if METADATA in str(exc):
        named = next((names for scheme, names in CREDENTIALS.items() if where.startswith(scheme)), "credentials")
        return RetryError(f"{where}: no credentials: {named} not set, and this machine's metadata service gave none")
    return RetryError(f"{where}: {_line(exc)}")


def _line(exc: BaseException) -> str:
    """Return what an error of the library says, in one line without what an address may carry besides: users, keys."""
    told = str(exc)
    if (code := CODE.search(told)) is not None:
        message = MESSAGE.search(told)
        return f"{code[1]}: {message[1].strip()}" if message is not None else code[1]
    text = (told.strip().splitlines() or [type(exc).__name__])[0]
    return QUERY.sub(r"\1", USER.sub(r"\1", text))[:300]


# --- Swapping something small


def publish(store: ObjectStore, key: str, data: bytes, tag: Tag | None) -> Tag:
    """Create (``tag`` None) or swap an object, and know whether it was done.

    Return its new tag.  ConflictError when another version is there; RetryError when it stays unknown: read and try
    again with the same bytes.  The bytes must never repeat those of an earlier version: a store's tag may be their
    hash, and then an old version looks like the present one.

    >>> from obstore.store import MemoryStore
    >>> store = Obstore(MemoryStore(), "memory://")
    >>> first = publish(store, "head", b"1", None)
    >>> publish(store, "head", b"2", first) != first
    True
    """
    try:
        return store.create(key, data) if tag is None else store.swap(key, data, tag)
    except UnsupportedError:
        raise
    except (PenstockError, OSError) as exc:
        try:
            found, info = store.get(key)
        except FileNotFoundError:
            if isinstance(exc, ConflictError):
                raise ConflictError(f"{store.url}/{key} is gone: {exc}") from exc
            raise exc from None  # it was not done
        if found == data:
            return info.tag
        if isinstance(exc, ConflictError) or info.tag != tag:
            raise RevisionMismatch(f"{store.url}/{key} has changed") from exc
        raise


def check_conditions(store: ObjectStore, key: str) -> None:
    """Try on a key of its own that the store keeps conditions; UnsupportedError when it does not.

    Some servers ignore them without a word, and then two publishers would both win.

    >>> from obstore.store import MemoryStore
    >>> check_conditions(Obstore(MemoryStore(), "memory://"), "probe")
    """
    try:
        tag = publish(store, key, b"1", None)  # the library may have retried and met its own write
    except FileNotFoundError:
        raise NotFoundError(f"{store.url}: there is no such bucket: nothing can be put there") from None
    try:
        publish(store, key, b"2", tag)
        must_fail: tuple[Callable[[], Tag], ...] = (
            lambda: store.create(key, b"3"),
            lambda: store.swap(key, b"4", tag),
        )
        for attempt in must_fail:
            with contextlib.suppress(ConflictError):
                attempt()
                raise UnsupportedError(
                    f"{store.url}: this store ignores conditions of a put: two publishers could both win"
                )
    finally:
        try:
            store.delete([key])
        except (PenstockError, OSError) as exc:  # who may put need not be allowed to remove
            _log.warning("%s; a byte on which conditions were tried stays there", exc)


# --- From a URL to a store

_memory: dict[str, Any] = {}
_memory_lock = threading.Lock()


def make_store(url: str, options: ObjectOptions | None = None) -> Obstore:
    """Return the store of a URL that obstore serves, at the root of its bucket."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"{url}: URLs need the package obstore: pip install 'penstock[objects]'") from None
    options = options or ObjectOptions()
    root, _ = split_url(url)
    if root.startswith("memory://"):
        from obstore.store import MemoryStore

        with _memory_lock:  # one of a name for the whole process
            store = _memory.setdefault(root, None) or MemoryStore()
            _memory[root] = store
        return Obstore(store, root, "", options)
    return Obstore(_connect(root, options), root, "", options)


def _connect(root: str, options: ObjectOptions) -> Any:
    from obstore.store import S3Store, from_url

    _check_addresses(root, options.config)
    seconds = dt.timedelta
    client = {
        "timeout": seconds(seconds=options.timeout_seconds),
        "connect_timeout": seconds(seconds=options.connect_seconds),
        "allow_http": _may_use_http(root, options),
    }
    retry: Any = {"retry_timeout": seconds(seconds=options.retry_seconds), "max_retries": 10}
    config = dict(options.config)
    endpoint = _endpoint(root, config)
    if endpoint and root.startswith("s3"):  # else a variable of the environment would win over what is asked for
        config.setdefault("aws_endpoint_url_s3", endpoint)
    try:
        if root.startswith("s3"):
            bucket = root.partition("://")[2]
            return S3Store(bucket, config=config, client_options=client, retry_config=retry)  # type: ignore[arg-type]
        return from_url(root, config=config, client_options=client, retry_config=retry)  # type: ignore[call-overload]
    except Exception as exc:  # noqa: BLE001 - of several kinds, all about what was given
        hint = ": set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be specified" in str(exc) else ""
        raise OptionsError(f"{root}: {_line(exc)}{hint}") from None


def environment_endpoint(url: str) -> str:
    """Return the address that the environment gives for stores of this kind of URL, empty where it gives none."""
    return _endpoint(url, {})


def may_use_http(url: str) -> bool:
    """Whether the environment has a store at this URL asked by plain http; OptionsError for a public address."""
    return _may_use_http(url, ObjectOptions())


def _endpoint(url: str, config: dict[str, Any]) -> str:
    for name in next((names for scheme, names in ENDPOINTS.items() if url.startswith(scheme)), ()):
        short = name.lower().partition("_")[2]
        for given in (config.get(name.lower()), config.get(short), os.environ.get(name)):
            if given:
                return str(given)
    return ""


def _check_addresses(root: str, config: dict[str, Any]) -> None:
    """Refuse an address that is none: the library takes it and gives up at the first request."""
    for name in next((names for scheme, names in ENDPOINTS.items() if root.startswith(scheme)), ()):
        for given in (config.get(name.lower()), os.environ.get(name)):
            if given is not None and not ADDRESS.fullmatch(str(given)):
                shown = USER.sub(r"\1", str(given))
                raise OptionsError(f"{root}: {name}={shown}: the address of a store is http://host or https://host")


def _may_use_http(root: str, options: ObjectOptions) -> bool:
    """Whether plain http may be used; OptionsError when it would go to a public address unasked."""
    endpoint = _endpoint(root, dict(options.config))
    if not endpoint.lower().startswith("http://"):
        return options.allow_http
    if options.allow_http or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"):
        return True
    if _is_private(urlsplit(endpoint).hostname or ""):
        return True
    shown = USER.sub(r"\1", endpoint)
    raise OptionsError(
        f"{root}: {shown} is a public address over plain http: data and signatures could be read on the way; "
        "set allow_http (AWS_ALLOW_HTTP=true) if that is meant"
    )


def _is_private(host: str) -> bool:
    """Whether a host is this machine, or one of a network that is not public.

    >>> [_is_private(host) for host in ("minio", "10.0.0.8", "::1", "8.8.8.8", "134744072", "\uff18")]
    [True, True, True, False, False, False]
    """
    import ipaddress

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return address.is_private or address.is_loopback or address.is_link_local
    if host == "localhost" or host.endswith((".localhost", ".internal", ".local")):
        return True
    # A number alone is an address as well: 134744072 is 8.8.8.8, in digits of any script.
    return (
        bool(host)
        and host.isascii()
        and "." not in host
        and ":" not in host
        and not re.fullmatch(r"0x[0-9a-f]*|[0-9]+", host)
    )


@functools.cache
def shared_store(root: str, _process: int) -> Obstore:
    """Return the store of a root with the settings of the environment, one for a process: making one takes 6 ms."""
    return make_store(root)

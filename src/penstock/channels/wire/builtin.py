"""Modulators that come with the server: a password file, JSON web tokens, JSON-schema checks of payloads.

    penstock channels serve --modulator penstock.channels.wire.builtin:PasswordFile

Each takes its settings as arguments, or from the environment when it is named on the command line:

    PasswordFile    PENSTOCK_PASSWORDS=FILE                     tokens are base64 of NUL user NUL password, or one word
    JsonWebTokens   PENSTOCK_JWT_KEY=FILE or PENSTOCK_JWT_URL=URL of a key set, PENSTOCK_JWT_AUDIENCE, PENSTOCK_JWT_ISSUER
    JsonSchema      PENSTOCK_SCHEMAS=FOLDER with HANDLER.json; a / of the handler is a . there
"""  # noqa: E501

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any, Final

from penstock.channels.ids import ChannelId, Nid
from penstock.disk.plain import read_small
from penstock.errors import OptionsError
from penstock.net import CredentialsFile

__all__ = ["PasswordFile", "JsonWebTokens", "JsonSchema"]

LEEWAY_SECONDS: Final = 30
"""How far the clock of whoever signs tokens may be off: one that was made just now is not from the future."""
SECRET_BYTES: Final = 32
"""How long a secret is at the least: HS256 is no stronger than it."""


class PasswordFile:
    """Lets in who is in a password file (``penstock.net.CredentialsFile``).

    >>> PasswordFile("nowhere.passwords")
    Traceback (most recent call last):
    penstock.errors.OptionsError: nowhere.passwords: No such file or directory
    """

    protocol = "penstock-passwords/1"

    def __init__(self, path: str | None = None) -> None:
        self._file = CredentialsFile(path or _setting("PENSTOCK_PASSWORDS", "the password file"))

    async def authenticate(self, token: str) -> str | None:
        """Return the user whose password, or whose token, this is."""
        try:
            parts = base64.b64decode(token, validate=True).split(b"\0")
        except ValueError:
            parts = []
        if len(parts) == 3:
            name = parts[1].decode(errors="replace")
            return name if await self._file.check(name, parts[2]) else None
        return self._file.current.name_of_token(token.encode())


class JsonWebTokens:
    """Lets in who brings a JSON web token that one of the keys has signed; the name is in ``sub``.

    ``key`` is a PEM file with a public key (or a secret of at least 32 bytes for HS256), ``url`` that of a key set.

    >>> JsonWebTokens()
    Traceback (most recent call last):
    penstock.errors.OptionsError: JSON web tokens: give a key file or the URL of a key set
    """

    protocol = "penstock-jwt/1"

    def __init__(
        self,
        key: str | None = None,
        url: str | None = None,
        *,
        audience: str | None = None,
        issuer: str | None = None,
        claim: str = "sub",
        keep_seconds: float = 300.0,
    ) -> None:
        """``keep_seconds``: how long a key set is kept; a key that was taken out of it lets people in as long."""
        key, url = key or os.environ.get("PENSTOCK_JWT_KEY"), url or os.environ.get("PENSTOCK_JWT_URL")
        if (key is None) == (url is None):
            raise OptionsError("JSON web tokens: give a key file or the URL of a key set")
        try:
            import jwt
        except ImportError:
            raise OptionsError("JSON web tokens need the package pyjwt: pip install 'penstock[serve]'") from None
        self._jwt = jwt
        self._audience = audience or os.environ.get("PENSTOCK_JWT_AUDIENCE")
        self._issuer, self._claim = issuer or os.environ.get("PENSTOCK_JWT_ISSUER"), claim
        self._key: Any = None
        self._keys = jwt.PyJWKClient(url, lifespan=keep_seconds) if url is not None else None
        if key is not None:
            try:
                self._key = read_small(key)
            except OSError as exc:
                raise OptionsError(f"{key}: {exc.strerror}") from exc
        # Never both kinds: a public key is known to everyone, and would be everyone's secret.
        public = self._keys is not None or self._key.lstrip().startswith(b"-----BEGIN")
        if not public and len(self._key) < SECRET_BYTES:
            raise OptionsError(f"{key}: a secret of {len(self._key)} bytes can be guessed, {SECRET_BYTES} are wanted")
        self._algorithms = ["RS256", "RS512", "PS256", "ES256", "ES384", "EdDSA"] if public else ["HS256", "HS512"]
        if self._key is not None and not any(map(self._may_be_for, self._algorithms)):
            raise OptionsError(f"{key}: no public key that a token could be signed with")

    def _may_be_for(self, algorithm: str) -> bool:
        try:
            self._jwt.get_algorithm_by_name(algorithm).prepare_key(self._key)
        except (ValueError, TypeError, self._jwt.PyJWTError):
            return False
        return True

    def authenticate(self, token: str) -> str | None:
        """Return the name in a token that is signed, meant for this server and not over."""
        try:
            key = self._key if self._keys is None else self._keys.get_signing_key_from_jwt(token).key
            claims = self._jwt.decode(
                token,
                key,
                algorithms=self._algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp"], "verify_aud": self._audience is not None},
            )
        except self._jwt.PyJWKClientConnectionError:
            raise  # nobody knows: that is a failure, not a no
        except self._jwt.PyJWTError:
            return None
        name = claims.get(self._claim)
        return name if isinstance(name, str) else None


class JsonSchema:
    """Refuses payloads of a channel that are not JSON as its schema says; channels without a schema take anything.

    >>> checks = JsonSchema({"readings": {"type": "object", "required": ["value"]}})
    >>> ops, ann = ChannelId("readings", "localhost"), Nid("ann", "localhost")
    >>> [checks.transform(ann, ops, payload) for payload in (b'{"value": 7}', b"{}", b"no", b"[" * 60_000)]
    [b'{"value": 7}', None, None, None]
    """

    protocol = "penstock-json-schema/1"

    def __init__(self, schemas: dict[str, Any] | None = None) -> None:
        try:
            import jsonschema
        except ImportError:
            raise OptionsError(
                "JSON-schema checks need the package jsonschema: pip install 'penstock[serve]'"
            ) from None
        if schemas is None:
            schemas = _read_schemas(_setting("PENSTOCK_SCHEMAS", "the folder of schemas"))
        self._checks: dict[str, Any] = {}
        for handler, schema in schemas.items():
            kind = jsonschema.validators.validator_for(schema)
            try:
                kind.check_schema(schema)
            except jsonschema.SchemaError as exc:
                raise OptionsError(f"the schema of {handler}: {exc.message}") from exc
            _check_references(handler, schema, kind)
            strict = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
            self._checks[handler] = strict(schema, registry=_known_schemas())

    def transform(self, nid: Nid, channel: ChannelId, payload: bytes) -> bytes | None:  # noqa: ARG002
        """Return the payload as it is, or None."""
        check = self._checks.get(channel.handler)
        if check is None:
            return payload
        try:
            return payload if check.is_valid(json.loads(payload)) else None
        except (ValueError, ArithmeticError, RecursionError):  # no JSON, or larger or deeper than anyone means it
            return None


def _known_schemas() -> Any:
    """Return the schemas that one may refer to: those of JSON schema itself; nothing is ever fetched."""
    from jsonschema_specifications import REGISTRY

    return REGISTRY


def _check_references(handler: str, schema: Any, kind: Any) -> None:
    """Refuse a schema that refers to what is not there: every message would find that out anew."""
    import referencing.jsonschema

    rules = referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])

    def walk(part: Any, resolver: Any) -> None:
        if isinstance(part, dict):
            resource = rules.create_resource(part)
            if resource.id() is not None:
                resolver = resolver.in_subresource(resource)
            if isinstance(reference := part.get("$ref"), str):
                try:
                    resolver.lookup(reference)
                except referencing.exceptions.Unresolvable as exc:
                    raise OptionsError(f"the schema of {handler}: $ref {reference!r} leads nowhere here") from exc
            part = [value for key, value in part.items() if key not in ("enum", "const", "default", "examples")]
        if isinstance(part, list):
            for inner in part:
                walk(inner, resolver)

    root = rules.create_resource(schema)
    walk(schema, _known_schemas().with_resource("", root).resolver())


def _unique_items(_: Any, wanted: bool, items: Any, __: Any) -> Iterator[Any]:
    """Say whether items are all different, in one pass: comparing each with each takes minutes for 64 KiB of them."""
    from jsonschema import ValidationError

    if wanted and isinstance(items, list) and len({_hashable(item) for item in items}) < len(items):
        yield ValidationError("its items are not all different")


def _hashable(value: Any) -> Any:
    """Return what is equal for values that JSON calls equal, and only for those.

    >>> [_hashable(1) == _hashable(other) for other in (1.0, True, "1")]
    [True, False, False]
    """
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, list):
        return "list", tuple(map(_hashable, value))
    if isinstance(value, dict):
        return "dict", frozenset((key, _hashable(inner)) for key, inner in value.items())
    return value


def _setting(name: str, what: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise OptionsError(f"{name} must name {what}")
    return value


def _read_schemas(folder: str) -> dict[str, Any]:
    found = {}
    try:
        for name in sorted(os.listdir(folder)):
            if name.endswith(".json"):
                found[name.removesuffix(".json").replace(".", "/")] = json.loads(read_small(f"{folder}/{name}"))
    except OSError as exc:
        raise OptionsError(f"{exc.filename or folder}: {exc.strerror}") from exc
    except ValueError as exc:
        raise OptionsError(f"{folder}/{name}: {exc}") from exc
    return found

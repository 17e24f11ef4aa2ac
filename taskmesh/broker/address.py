"""What a URL says: how a connection is made, and where the primary is to be found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from redis.asyncio import connection as clients

from taskmesh.errors import ConfigurationError

CONNECT_TIMEOUT = 5.0
SENTINEL_PORT = 26379
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
Node = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """A URL that was read.

    Attributes:
        where: the URL without its password, for people to read.
        connection: the redis package's class of connection.
        arguments: what it is made with.
        service: the name by which the sentinels know the primary; "" without sentinels.
        sentinels: where to ask for it.
        sentinel_arguments: what a connection to a sentinel is made with, host and port left out.
    """

    where: str
    connection: type[clients.AbstractConnection]
    arguments: dict[str, Any]
    service: str = ""
    sentinels: tuple[Node, ...] = ()
    sentinel_arguments: dict[str, Any] | None = None


def read_url(url: str) -> Address:
    """Read ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://user:password@host:port,.../service/db``.

    The query takes the redis package's options (``ssl_ca_certs`` and the like); with sentinels also
    ``sentinel_username`` and ``sentinel_password``, where they have credentials of their own.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if url.partition("://")[0] in SENTINEL_SCHEMES:
        return _read_sentinel_url(url)
    return _read(url)


def _read(url: str) -> Address:
    where = without_password(url)
    try:
        parsed: dict[str, Any] = dict(clients.parse_url(url))
    except ValueError as error:
        raise ConfigurationError(f"Redis URL {where!r}: {error}") from None
    made_of: Any = parsed.pop("connection_class", clients.Connection)
    if made_of is clients.UnixDomainSocketConnection and "path" not in parsed:
        raise ConfigurationError(f"Redis URL {where!r} names no socket: write unix:///path/to/redis.sock")
    # No timeout here: every wait has its own where it is made.
    arguments = {**parsed, "socket_timeout": None, "protocol": 2, "socket_read_size": 65536}
    arguments.setdefault("socket_connect_timeout", CONNECT_TIMEOUT)
    return Address(where, made_of, arguments)


def _read_sentinel_url(url: str) -> Address:
    where = without_password(url)
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.lstrip("/").partition("/")
    if not service or not hosts:
        raise ConfigurationError(
            f"Redis URL {where!r}: write redis+sentinel://host:port,host:port/service, the service being "
            "the primary's name in the sentinels' configuration"
        )
    query = parse_qs(parts.query)
    own = {name.removeprefix("sentinel_"): query.pop(name)[0] for name in _SENTINEL_OPTIONS if name in query}
    rest = "&".join(f"{name}={value}" for name, values in query.items() for value in values)
    plain = (SENTINEL_SCHEMES[parts.scheme], f"{credentials}{at}sentinel", f"/{database}", rest, "")
    primary = _read(urlunsplit(plain))
    arguments = {
        name: value
        for name, value in primary.arguments.items()
        if name not in ("host", "port", "db", "username", "password")
    }
    sentinels = tuple(_read_node(host, where) for host in hosts.split(","))
    return Address(
        where, primary.connection, primary.arguments, unquote(service), sentinels, {**arguments, **own}
    )


def _read_node(text: str, where: str) -> Node:
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]"):  # no port, or an IPv6 address alone
        host, port = text.strip(), str(SENTINEL_PORT)
    if not host or not port.isdigit():
        raise ConfigurationError(f"Redis URL {where!r}: {text!r} is no host:port")
    return host.strip("[]"), int(port)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    scheme, separator, rest = url.partition("://")
    host = rest.rpartition("@")[2]
    return f"{scheme}{separator}{host.partition('?')[0]}"

"""Network addresses: what they refer to, how URLs write them, and sockets that listen on them."""

from __future__ import annotations

import ipaddress
import socket


def is_address(host: str) -> bool:
    """Return whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def host_and_port(host: str, port: int) -> str:
    """Return ``host:port`` as URLs write it, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_on(host: str, port: int = 0, *, backlog: int | None = 128) -> socket.socket:
    """Return a socket that listens on this address only; port 0 means any free port.

    If ``backlog`` is None, the socket is only bound, and nobody can connect to it. Raises `OSError` if the address
    cannot be used, and `OverflowError` if the port is out of range.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, which delays each answer by 40 ms, only if the protocol is explicit.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener

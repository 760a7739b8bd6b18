"""TLS: a server's certificate and key, and the CA certificates with which this process's clients verify servers."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import functools
import os
import ssl
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

CA_VARIABLE = "INFLIGHT_TLS_CA"
"""Environment variable that names a file with certificates that clients trust in addition to the system's."""
CERTIFICATE_VARIABLE = "INFLIGHT_TLS_CLIENT_CERTIFICATE"
KEY_VARIABLE = "INFLIGHT_TLS_CLIENT_KEY"
"""Environment variables that name a client's certificate and key files, for servers that require them."""
_HANDSHAKE_S = 10


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """Return the context for a server with these PEM files, or None if there are none.

    With ``client_ca``, clients need a certificate signed by that CA. Raises `ConfigError` if a file cannot be used.
    """
    if certificate is None or key is None:
        if (certificate, key, client_ca) != (None, None, None):
            raise ConfigError("--tls-certificate and --tls-key require each other, and --tls-client-ca requires both")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, str(certificate), str(key))
    if client_ca is not None:
        _load_ca(context, str(client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@functools.cache
def client_tls() -> ssl.SSLContext:
    """Return this process's client context, created once because that takes 40 ms. Raises `ConfigError`.

    It verifies names and certificates against the system's certificates and those in ``$INFLIGHT_TLS_CA``.
    """
    context = ssl.create_default_context()
    if ca := os.environ.get(CA_VARIABLE):
        _load_ca(context, ca)
    if certificate := os.environ.get(CERTIFICATE_VARIABLE):
        _load_certificate(context, certificate, os.environ.get(KEY_VARIABLE) or certificate)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key, password="")  # an encrypted key is refused instead of asked for
    except OSError as error:  # ssl.SSLError too
        reason = error.strerror if error.filename or not isinstance(error, ssl.SSLError) else error.reason or error
        raise ConfigError(
            f"the TLS certificate {certificate!r} with the key {key!r} cannot be used: {reason}; both must be PEM "
            "files, and the key must have no passphrase"
        ) from error


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"the TLS certificates in {path!r} cannot be used: {error}; it is a PEM file") from error


class Handshake(asyncio.sslproto.SSLProtocol):
    """A connection whose TLS handshake may take ten seconds. If too many handshakes are pending, the oldest is aborted.

    With asyncio's own class, a handshake may take a minute, and the number of pending handshakes is unlimited.
    """

    def __init__(self, inner: Any, context: ssl.SSLContext, underway: dict[Any, None], most: int) -> None:
        loop = asyncio.get_running_loop()
        waiter: Any = None
        super().__init__(loop, inner, context, waiter, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S)
        self._underway, self._most = underway, most

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake."""
        self._raw = transport
        self._underway[self] = None
        if len(self._underway) > self._most:
            oldest = next(iter(self._underway))
            del self._underway[oldest]
            oldest._raw.abort()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the pending handshakes."""
        self._underway.pop(self, None)
        super().connection_lost(exc)

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        self._underway.pop(self, None)
        super()._on_handshake_complete(handshake_exc)

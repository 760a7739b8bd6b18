"""The tokens that clients send to servers: read from a file or from the environment, and compared with a header."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from inflight.errors import ConfigError

TOKEN_VARIABLE = "INFLIGHT_TOKEN"
GENERATION_TOKEN_VARIABLE = "INFLIGHT_GENERATION_TOKEN"


def read_token(token_file: Path | None, variable: str = TOKEN_VARIABLE) -> str | None:
    """Return the token in a file, or else the token in an environment variable, or else None. Raises `ConfigError`."""
    if token_file is not None:
        try:
            token, source = token_file.read_text(errors="replace").strip(), f"token file {str(token_file)!r}"
        except OSError as error:
            raise ConfigError(f"token file {str(token_file)!r} cannot be read: {error.strerror}") from error
        if not token:
            raise ConfigError(f"{source} is empty")
    else:
        token, source = os.environ.get(variable, ""), f"${variable}"
        if not token:
            return None
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"{source} contains characters that are not allowed in an HTTP header; use printable ASCII without spaces"
        )
    return token


def carries_token(header: str, *tokens: str, scheme: str = "Bearer ") -> bool:
    """Return whether a header is the scheme and one of the tokens, in a time that does not depend on their content."""
    return any(hmac.compare_digest(header.encode(), f"{scheme}{token}".encode()) for token in tokens)

"""Routes of Tinker's API that are refused, with the reasons."""

from __future__ import annotations

CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
_NO_ACCOUNTS = "this server has no accounts"
_NO_PROJECTS = "this server has no projects"
REFUSED_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("POST", f"{CHECKPOINT}/publish", f"{_NO_ACCOUNTS}: all clients share its key, and with it every checkpoint"),
    ("DELETE", f"{CHECKPOINT}/publish", f"{_NO_ACCOUNTS}: all clients share its key, and with it every checkpoint"),
    ("GET", f"{CHECKPOINT}/external_weights_urls", "this server stores no weights elsewhere: copy them from its disk"),
    ("POST", "/copy_weights", f"{_NO_PROJECTS} that weights could be copied to"),
    ("PUT", "/sessions/{session_id}/project", f"{_NO_PROJECTS} that a session could be assigned to"),
    ("GET", "/sessions/{session_id}/trace_export", "this server records no traces of sessions"),
    ("POST", "/sessions/search", "sessions cannot be searched: list them instead"),
    (
        "POST",
        "/create_custom_loss",
        "custom losses do not run on this server: pass a function to forward_backward_custom",
    ),
    ("GET", "/audit", f"{_NO_ACCOUNTS}, and so no audit log"),
    ("GET", "/billing/usage/events", f"{_NO_ACCOUNTS}, and so no billing"),
    ("GET", "/billing/usage/checkpoints/current", f"{_NO_ACCOUNTS}: checkpoints list their sizes"),
)
"""The method, the path and the reason that the error states."""

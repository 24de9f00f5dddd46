"""Who may call a gRPC server of the job: a host of the same job, and whoever has its token, where one is set."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

TOKEN_KEY = "x-hetero-token"  # noqa: S105 - the name of the metadata, not a token
CLUSTER_KEY = "x-hetero-cluster"
REFUSAL_LOG_INTERVAL_S = 5.0


class Door:
    """Compares tokens and logs who was refused, at most one line in `REFUSAL_LOG_INTERVAL_S`.

    Args:
        token: The job's shared secret; None lets everybody in.
        logger: Where refusals are logged.
        cluster: What the hosts of the job know themselves by; None asks nobody for it.
    """

    def __init__(self, token: str | None, logger: logging.Logger, cluster: str | None = None) -> None:
        self._token = None if token is None else token.encode()
        self._cluster = cluster
        self._logger = logger
        self._logged_s = -REFUSAL_LOG_INTERVAL_S
        self._unlogged = 0

    def is_stranger(self, context: Any) -> bool:
        """Return whether the caller says that it belongs to another job, which looks for a coordinator of its own.

        To be asked before the token, which differs between jobs: its refusal would end the stranger's host.
        """
        given = next((value for key, value in context.invocation_metadata() or () if key == CLUSTER_KEY), None)
        return self._cluster is not None and given is not None and given != self._cluster

    def why_refused(self, context: Any) -> str | None:
        """Return why the caller of a gRPC context is refused, None if it may come in."""
        if self._token is None:
            return None
        given = next((value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY), None)
        if given is not None and hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._token):
            return None
        reason = "no token" if given is None else "wrong token"
        self._log(context.peer(), reason)
        return f"{reason}: this job's hosts share one, set it with --token or HETERO_TOKEN"

    def _log(self, peer: str, reason: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < REFUSAL_LOG_INTERVAL_S:
            self._unlogged += 1
            return
        more = f" (and {self._unlogged} more since the last such line)" if self._unlogged else ""
        self._logger.warning("refused a call from %s: %s%s", peer, reason, more)
        self._logged_s, self._unlogged = now_s, 0

"""Whether an error is a rank's own, or only follows from the end of another rank."""

from __future__ import annotations

import sys

from hetero.errors import HeteroError


def follows_from_a_peer(error: BaseException) -> bool:
    """Return True if the cause of an error is to be looked for in another rank or host.

    Asks only the libraries that this process has loaded.
    """
    if isinstance(error, HeteroError) and error.secondary:
        return True
    checks = []
    if "horovod" in sys.modules:
        from hetero.training import horovod

        checks.append(horovod.is_peer_failure)
    if "torch.distributed" in sys.modules:
        from hetero.training import torch_peers

        checks.append(torch_peers.is_peer_failure)
    try:
        return any(check(error) for check in checks)
    except Exception:  # they read the error's text, and that can raise whatever the job made of it
        return False

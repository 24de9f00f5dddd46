"""The control plane: who is here, where everything is, is training over.

`client` is what hosts use, `coordinator` is the service, `ledger` its rules; all see the job as `state.JobState`.
"""

from __future__ import annotations

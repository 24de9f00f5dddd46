"""Entry point on every host of a job: `python launcher.py --job path/to/job.py:name ...`."""

import signal
import sys
from pathlib import Path

for number in (signal.SIGTERM, signal.SIGINT):  # one that comes while the rest is being imported has its exit code too
    signal.signal(number, lambda received, _frame: sys.exit(128 + received))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # the source directory may not be installed as a package

from hetero.launcher import launch  # noqa: E402  after what it needs

if __name__ == "__main__":
    launch()

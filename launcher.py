"""Entry point on every host of a job: `python launcher.py --job path/to/job.py:name ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the source directory may not be installed as a package

from hetero.launcher import launch

if __name__ == "__main__":
    launch()

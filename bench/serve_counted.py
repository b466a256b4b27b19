"""`astrai-deploy serve`, with the time inside the model counted in a file: `serve_counted.py COUNTS ARGUMENTS...`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from _steps import Recorder  # noqa: E402

from astrai_deploy.cli import main  # noqa: E402

if __name__ == "__main__":
    Recorder(Path(sys.argv[1])).wrap()
    sys.exit(main(["serve", *sys.argv[2:]]))

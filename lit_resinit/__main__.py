"""``python -m lit_resinit``."""

import sys

from lit_resinit.cli import main

if __name__ == "__main__":
    sys.exit(main())

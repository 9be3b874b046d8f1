"""``python -m specjax`` is ``specjax``."""

import sys

from specjax.cli import main

sys.exit(main())

"""`python -m squall` is `squall`."""

import sys

from squall.cli import main

sys.exit(main())

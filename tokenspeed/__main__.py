"""``python -m tokenspeed``: the same as the ``tokenspeed`` command."""

import sys

from tokenspeed.cli import main

sys.exit(main())

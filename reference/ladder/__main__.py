"""`python -m reference.ladder`."""

import sys

from reference.ladder.command import main

sys.exit(main())

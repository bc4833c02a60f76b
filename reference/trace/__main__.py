"""`python -m reference.trace`."""

import sys

from reference.trace.recorder import main

sys.exit(main())

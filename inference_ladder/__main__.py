"""`python -m inference_ladder`."""

import sys

from inference_ladder.console import main

sys.exit(main())

"""`python -m lessons.l20_parallelism.planner`."""

import sys

from lessons.l20_parallelism.lab.planner_command import main

sys.exit(main())

"""The commands behind `make check` and `make progress`: python -m lessons.toolbox.exercises --help."""

import sys

from lessons.toolbox.exercises.exercise import main

sys.exit(main())

"""What every worker imports, imported once by the server that workers are forks of. That saves each
of them seconds. lessons/l20_parallelism/processes/warm.py does the same for a rank.
"""

from transformers import AutoConfig  # noqa: F401  (reads a checkpoint's config.json)

import reference.parallel.processes  # noqa: F401

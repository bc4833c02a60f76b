"""What every worker imports, imported once by the server that workers are forks of. That saves each of
them seconds. lessons/l20_parallelism/warm.py does the same for a rank.
"""

import transformers.models.auto.configuration_auto  # noqa: F401

import reference.parallel.processes  # noqa: F401

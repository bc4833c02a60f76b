"""What every rank imports, imported once: launch.py's server loads this file, and ranks are forks
of the server. That saves each rank a second or more.
"""

import torch
import transformers.models.auto.configuration_auto  # noqa: F401 (it reads config.json)

import lessons.l07_kernel_fusion.optimized
import lessons.l12_paged_kv.optimized
import lessons.l12_paged_kv.runner
import lessons.l20_parallelism.optimized  # noqa: F401

# the first random numbers on the meta device import 800 modules
torch.empty(1, device="meta").normal_()

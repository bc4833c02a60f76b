"""PEFT's format: what is read, what is refused by name, and logits equal to peft's own."""

import json
import shutil
from math import sqrt

import pytest
import torch

from lessons.l02_naive_attention.naive import naive_attend
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l21_multi_lora import naive, stand_ins
from lessons.l21_multi_lora.adapters import check_complete, load_adapter, save_adapter
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.lab.testing import linears_of, random_adapter, tiny_model
from lessons.l21_multi_lora.layers import (
    adapter_layers,
    add_lora_for,
    merged,
    unmerged,
    with_adapter_slots,
)
from lessons.l21_multi_lora.slots import AdapterSlots

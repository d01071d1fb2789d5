"""Our compressors. They do arithmetic, so that TensorFlow is imported with them, and they only where one is named."""

import sys

from autodist.quiet import quiet_tensorflow

with quiet_tensorflow(when="tensorflow" not in sys.modules):
    from autodist.compressors.power_sgd import PowerSGD
    from autodist.compressors.sixteen_bits import BFloat16, Float16
    from autodist.compressors.top_k import TopK

__all__ = ["BFloat16", "Float16", "PowerSGD", "TopK"]

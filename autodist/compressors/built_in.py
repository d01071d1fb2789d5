"""Built-in compressors, imported on first use, because they import TensorFlow."""

from autodist.tf_compat.importing import importing_tensorflow

with importing_tensorflow():
    from autodist.compressors.eight_bits import Float8, Int8
    from autodist.compressors.power_sgd import PowerSGD
    from autodist.compressors.sixteen_bits import BFloat16, Float16
    from autodist.compressors.top_k import TopK

__all__ = ["BFloat16", "Float8", "Float16", "Int8", "PowerSGD", "TopK"]

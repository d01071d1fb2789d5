"""The messages of strategy.proto; their types are in strategy_pb2.pyi, which the build writes."""

from autodist.proto.descriptor_set import module_of

globals().update(module_of("strategy.proto", __name__))

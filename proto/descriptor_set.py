"""Makes the classes of messages from the descriptor set into which the build compiles `*.proto`.

Code that protoc generates runs with a few versions of protobuf only. A descriptor set is data that all versions read.
"""

from __future__ import annotations

import pathlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILE = pathlib.Path(__file__).with_name("messages.binpb")


def module_of(proto: str, name: str) -> dict[str, Any]:
    """Returns the global names of a module for a `.proto` file: its messages by name, and `DESCRIPTOR`.

    The classes are equal in all modules and after a reload, since they belong to protobuf's default pool.

    Args:
        proto: the file, such as `strategy.proto`. It has no enums outside messages.
        name: the module's name.

    Raises:
        ImportError: the package has not been built.
    """
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file
    except FileNotFoundError as error:
        raise ImportError(
            f"{_FILE} is missing: it is compiled when AutoDist is built; install the package, or in a checkout run "
            "`pip install --editable .`"
        ) from error
    pool = descriptor_pool.Default()
    for file in files:  # in the order of their imports
        pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindFileByName(f"autodist/proto/{proto}")
    classes = {kind: message_factory.GetMessageClass(one) for kind, one in descriptor.message_types_by_name.items()}
    for one in classes.values():
        one.__module__ = name
    return {"DESCRIPTOR": descriptor, **classes}

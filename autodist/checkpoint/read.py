"""Checks a checkpoint before any variable changes: integrity, and match with the objects."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2 as graph_pb2

from autodist.checkpoint.content import OURS, SIDE_FILE
from autodist.checkpoint.files import checksums, unsealed
from autodist.checkpoint.folder import FORMAT, digest
from autodist.checkpoint.objects import GRAPH_KEY, ObjectValue, SavedObjects, match
from autodist.errors import CheckpointError, CheckpointMismatchError

_COUNTER = "save_counter/.ATTRIBUTES/VARIABLE_VALUE"
"""The variable that only `Checkpoint.save` adds, not `Checkpoint.write`."""

_UNREADABLE = (tf.errors.OpError, ValueError, RuntimeError, OSError, IndexError)
"""Exceptions that TensorFlow raises for altered files."""


def read_about(prefix: str) -> Mapping[str, Any]:
    """Returns the content of the side file; {} if TensorFlow alone has written the checkpoint.

    Raises:
        CheckpointError: it is damaged, or of a later version.
    """
    try:
        with open(f"{prefix}.json") as opened:
            text = opened.read()
        version = json.loads(text)["format"]
        is_later = version > FORMAT
        about = {} if is_later else unsealed(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(prefix, f"{prefix}.json: {error}") from error
    if is_later:
        raise CheckpointError(
            f"{prefix}.json has format {version}, and this AutoDist supports {FORMAT}: a later version has "
            "written it. Restore it with that version."
        )
    return about


def read_whole(prefix: str) -> Mapping[str, Any]:
    """Does the same as `read_about`, and checks all files by AutoDist's checksums, or else by TensorFlow's own.

    Raises:
        CheckpointError: a file is missing, shorter or altered.
    """
    about = read_about(prefix)
    if not os.path.exists(f"{prefix}.index"):
        raise CheckpointError(f"there is no checkpoint {prefix}: {prefix}.index is missing. Pass the path of another.")
    _require_written(prefix, about.get("files", {}))
    try:
        reader = tf.train.load_checkpoint(prefix)
        if not about and reader.has_tensor(SIDE_FILE):
            raise _damaged(prefix, f"{prefix}.json is missing, which holds the step and all other state but variables")
        for key in () if about else reader.get_variable_to_shape_map():
            reader.get_tensor(key)
    except _UNREADABLE as error:
        raise _damaged(prefix, str(error)) from error
    return about


def _require_written(prefix: str, files: Mapping[str, Any]) -> None:
    """Checks files against their lengths and checksums; compares all lengths before it reads any file."""
    paths = {prefix + suffix: entry for suffix, entry in files.items()}
    try:
        for path, entry in paths.items():
            size = os.path.getsize(path)
            if size != entry["bytes"]:
                raise _damaged(prefix, f"{path} has {size} bytes, and {entry['bytes']} were written")
        found = checksums(paths)
    except FileNotFoundError as error:
        raise _damaged(prefix, f"{error.filename} is missing") from error
    except OSError as error:
        raise _damaged(prefix, str(error)) from error
    for path, entry in paths.items():
        if found[path] != entry["crc32"]:
            raise _damaged(prefix, f"{path} is not what was written: it has another checksum")


def require_seen(worker: int, prefix: str, index: str | None = None) -> None:
    """Checks that a worker's machine sees the checkpoint that the chief has found.

    Args:
        worker: its index.
        prefix: the prefix of the checkpoint.
        index: the SHA-256 of the chief's index file; None: any.

    Raises:
        CheckpointError: the machine does not see it.
    """
    path = f"{prefix}.index"
    if worker > 0 and not (os.path.exists(path) and index in (None, digest(path))):
        raise CheckpointError(
            f"worker {worker} does not see {prefix}, which the chief has found. Keep checkpoints in a folder that all "
            "machines share, or copy them to each before the script starts, as `sync` does."
        )


def _damaged(prefix: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {prefix} is damaged, and nothing was restored: {fault}. Remove its files ({prefix}.*), so "
        "that the one before is the last, or restore another by its path."
    )


def saved_graph(prefix: str) -> graph_pb2.TrackableObjectGraph | None:
    """Returns the object graph of a checkpoint; None if it holds variables by name only, like that of a `Saver`."""
    reader = tf.train.load_checkpoint(prefix)
    if not reader.has_tensor(GRAPH_KEY):
        return None
    graph = graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(GRAPH_KEY))
    return graph


def require_same(prefix: str, objects: SavedObjects, graph: graph_pb2.TrackableObjectGraph | None) -> dict[str, str]:
    """Maps the key of each current value to the key of the saved one.

    Raises:
        CheckpointMismatchError: it was saved from other objects; names all differences.
    """
    saved = saved_values(tf.train.load_checkpoint(prefix))
    keys = dict(_keys_by_objects(objects, graph) if graph is not None else _keys_by_names(objects, saved))
    now = {key: _describe(value) for key, value in objects.values.items()}
    require_alike(prefix, now, saved, keys, optional={_COUNTER})
    return keys


def saved_values(reader: Any) -> dict[str, str]:
    """Returns `described` of each value in a checkpoint by key, without AutoDist's own values."""
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {key: described(shapes[key], dtypes[key]) for key in shapes if key != GRAPH_KEY and not key.startswith(OURS)}


def described(shape: Iterable[int], dtype: tf.DType) -> str:
    """Formats a shape and a dtype, for messages and comparison."""
    return f"{tuple(shape)} {dtype.name}"


def require_alike(
    prefix: str,
    now: Mapping[str, str],
    saved: Mapping[str, str],
    keys: Mapping[str, str] | None = None,
    optional: Set[str] = frozenset(),
) -> None:
    """Checks that a checkpoint has exactly the values to be restored.

    Args:
        prefix: the prefix of the checkpoint.
        now: `described` of each value to be restored; "" if any shape and dtype will do.
        saved: `described` of each value in the checkpoint.
        keys: maps names in `now` to names in `saved`; None: the names are equal.
        optional: names that only one of them may have.

    Raises:
        CheckpointMismatchError: it does not; names all differences.
    """
    keys = {name: name for name in now.keys() & saved.keys()} if keys is None else keys
    missing = sorted(now.keys() - keys.keys() - optional)
    left_over = sorted(saved.keys() - set(keys.values()) - optional)
    others = [
        f"{name} (saved {saved[key]}, now {now[name]})"
        for name, key in sorted(keys.items())
        if now[name] not in ("", saved[key])
    ]
    if missing or left_over or others:
        raise CheckpointMismatchError(prefix, tuple(missing), tuple(left_over), tuple(others))


def _describe(value: ObjectValue) -> str:
    """Describes a variable; other values may have had another shape, so they yield ""."""
    if value.variable is None:
        return ""
    return described(value.variable.shape.as_list(), value.variable.dtype.base_dtype)


def _keys_by_objects(objects: SavedObjects, theirs: graph_pb2.TrackableObjectGraph) -> Iterator[tuple[str, str]]:
    for own, node in match(objects.graph, theirs).items():
        saved = {attribute.name: attribute.checkpoint_key for attribute in theirs.nodes[node].attributes}
        for attribute in objects.graph.nodes[own].attributes:
            if attribute.name in saved:
                yield attribute.checkpoint_key, saved[attribute.name]


def _keys_by_names(objects: SavedObjects, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for value in objects.values.values():
        if value.variable is not None and value.full_name in saved:
            yield value.key, value.full_name

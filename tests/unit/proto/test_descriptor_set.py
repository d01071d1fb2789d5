"""The messages: classes that any protobuf makes from the compiled descriptor set, the same ones after a reload."""

from __future__ import annotations

import ast
import importlib
import pathlib
import pickle
import subprocess
import sys

import google.protobuf
import pytest

from autodist.proto import descriptor_set, strategy_pb2

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "proto"
PROTOS = sorted(path.stem for path in FOLDER.glob("*.proto"))


@pytest.mark.parametrize("proto", PROTOS)
def test_a_module_has_the_names_that_its_types_declare(proto: str) -> None:
    module = importlib.import_module(f"autodist.proto.{proto}_pb2")
    types = ast.parse((FOLDER / f"{proto}_pb2.pyi").read_text(encoding="utf-8"))
    declared = {one.name for one in types.body if isinstance(one, ast.ClassDef)}
    made = {name: one for name, one in vars(module).items() if isinstance(one, type)}
    assert made.keys() == declared
    assert {one.__module__ for one in made.values()} == {module.__name__}
    assert module.DESCRIPTOR.name == f"autodist/proto/{proto}.proto"


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_the_classes_are_made_without_a_warning_by_the_protobuf_that_is_installed(implementation: str) -> None:
    code = "from autodist.proto.strategy_pb2 import Compressor as C; print(C(kind=C.NAMED).kind, C.Kind.Name(3))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 POWER_SGD\n", ""), google.protobuf.__version__


def test_a_strategy_survives_its_bytes_and_a_pickle() -> None:
    written = strategy_pb2.Strategy(builder="×", mesh=strategy_pb2.Mesh(axes=[strategy_pb2.MeshAxis(name="a", size=2)]))
    read = strategy_pb2.Strategy.FromString(written.SerializeToString())
    assert read == written == pickle.loads(pickle.dumps(written))
    assert read != strategy_pb2.Strategy()


def test_a_second_import_has_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, strategy_pb2.__name__)
    again = importlib.import_module(strategy_pb2.__name__)
    assert again is not strategy_pb2
    assert again.Strategy is strategy_pb2.Strategy


def test_a_package_that_was_not_built_is_an_error_that_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(descriptor_set, "_FILE", tmp_path / "messages.binpb")
    with pytest.raises(ImportError, match="messages.binpb is missing.*pip install --editable"):
        descriptor_set.module_of("strategy.proto", "any")

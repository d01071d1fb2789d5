"""Maps the folders at the top into the package and compiles the protos at build time; all else is in pyproject.toml."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

from setuptools import Command, find_packages, setup
from setuptools.command.build import build

HERE = pathlib.Path(__file__).resolve().parent

# They stand at the top because they are what people extend; `strategies` is imported as `autodist.strategies`.
FOLDERS = ("strategies", "kernels", "proto")

# autodist.proto.descriptor_set reads it.
DESCRIPTOR_SET = "messages.binpb"


def all_packages() -> list[str]:
    """Every folder that has an `__init__.py`, by the name under which it is imported."""
    packages = find_packages(str(HERE), include=["autodist", "autodist.*"])
    for folder in FOLDERS:
        inside = find_packages(str(HERE / folder))
        packages += [f"autodist.{folder}", *(f"autodist.{folder}.{name}" for name in inside)]
    return packages


def compile_protos(target: pathlib.Path) -> None:
    """Writes the descriptor set of all protos, and the types `X_pb2.pyi` of each `X.proto`, into the folder `target`.

    A file that is there with what is to stand in it is left alone: somebody may read it just now.
    """
    protos = sorted(path.name for path in (HERE / "proto").glob("*.proto"))
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made) / "autodist" / "proto"
        folder.mkdir(parents=True)
        # `-Iautodist/proto=proto` gives the files the names under which they are imported.
        outputs = [f"--descriptor_set_out={folder / DESCRIPTOR_SET}", "--include_imports", f"--pyi_out={made}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Iautodist/proto=proto", *outputs]
        subprocess.run([*command, *(f"proto/{name}" for name in protos)], cwd=HERE, check=True)
        new = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        old = {path.name: path.read_bytes() for path in [*target.glob("*_pb2.pyi"), *target.glob(DESCRIPTOR_SET)]}
        for name in old.keys() - new.keys():
            (target / name).unlink()
        for name, text in new.items():
            if old.get(name) != text:
                (target / name).write_bytes(text)


class BuildProtos(Command):
    """A step of `build`, after the Python files are collected.

    It is no subclass of `build_py`: setuptools turns a failure of a changed `build_py` into a warning when it installs
    in editable mode.
    """

    description = "compile proto/*.proto"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012 (setuptools reads it from the class)

    build_lib: str | None
    editable_mode: bool

    def initialize_options(self) -> None:
        self.build_lib, self.editable_mode = None, False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        target = HERE / "proto" if self.editable_mode else self._built
        target.mkdir(parents=True, exist_ok=True)
        compile_protos(target)

    def get_source_files(self) -> list[str]:
        return [f"proto/{path.name}" for path in sorted((HERE / "proto").glob("*.proto"))]

    def get_outputs(self) -> list[str]:
        return [str(self._built / name) for name in self._made()]

    def get_output_mapping(self) -> dict[str, str]:
        """Where each output comes from in editable mode, where it stays beside its source."""
        return {str(self._built / name): f"proto/{name}" for name in self._made()} if self.editable_mode else {}

    @property
    def _built(self) -> pathlib.Path:
        assert self.build_lib is not None, "set by finalize_options"
        return pathlib.Path(self.build_lib) / "autodist" / "proto"

    @staticmethod
    def _made() -> list[str]:
        stems = sorted(path.stem for path in (HERE / "proto").glob("*.proto"))
        return [DESCRIPTOR_SET, *(f"{stem}_pb2.pyi" for stem in stems)]


class BuildWithProtos(build):
    """The build of setuptools, and the protos."""

    sub_commands = [*build.sub_commands, ("build_protos", None)]  # noqa: RUF012 (as in setuptools)


if __name__ == "__main__":
    setup(
        packages=all_packages(),
        package_dir={f"autodist.{folder}": folder for folder in FOLDERS},
        package_data={
            "autodist": ["py.typed"],
            "autodist.strategies": ["presets/*.yml"],
            "autodist.proto": ["*.proto"],
        },
        cmdclass={"build": BuildWithProtos, "build_protos": BuildProtos},
    )

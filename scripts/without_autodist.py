#!/usr/bin/env python3
"""Prints a training script with its AutoDist lines taken out: the same script for one device.

    python scripts/without_autodist.py examples/digits_keras.py > alone.py

Replacements:

    from autodist import AutoDist            nothing
    ad = AutoDist("cluster.yml")             nothing
    with ad.scope():                         if True:
    with graph.as_default(), ad.scope():     with graph.as_default():
    @ad.function                             @tf.function
    @ad.function(batch="global")             @tf.function
    ad.function(step, batch_axis={"x": 1})   tf.function(step)
    ad.create_distributed_session()          tf.compat.v1.Session()
    ad.is_chief                              True
    ad.worker_index                          0
    ad.num_workers, ad.num_replicas          1
    ad.reduce(x, "mean")                     x
    ad.distribute_dataset(data)              data
    ad.batch_slice(first, last)              slice(first, last)
    ad.pull()                                nothing

"Nothing" is `pass` inside a block, which must not be left empty. All else, comments and line breaks included, stays
unchanged. Any other use of AutoDist is an error that names the line, so that the printed script is always free of
AutoDist.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sys
from dataclasses import dataclass

VALUES = {
    "function": "tf.function",
    "batch_slice": "slice",
    "is_chief": "True",
    "worker_index": "0",
    "num_workers": "1",
    "num_replicas": "1",
    "num_replicas_in_sync": "1",
}
CALLS = {"create_distributed_session": "tf.compat.v1.Session()"}
FIRST_ARGUMENT = {"reduce", "distribute_dataset"}
DROPPED = {"pull"}
OF_MANY_DEVICES = {"batch", "batch_axis"}
"""Arguments of `ad.function` that `tf.function` does not have."""


class LeftOverError(ValueError):
    """The script uses a part of AutoDist that has no counterpart on one device.

    Args:
        line: line number, counted from 1.
        text: text of the line.
    """

    def __init__(self, line: int, text: str) -> None:
        self.line, self.text = line, text
        super().__init__(
            f"line {line}: {text!r} has no counterpart on one device; "
            f"what can be taken out is listed at the top of without_autodist.py"
        )


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes `start` to `stop` of the source by `text`."""

    start: int
    stop: int
    text: bytes = b""


class Source:
    """A parsed script with the byte position of each node (`ast` counts columns in bytes of UTF-8)."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._line_starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None, "parsed nodes have an end"
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def nothing(self, node: ast.stmt) -> Edit:
        """Removes a statement: with its lines if they contain nothing else, otherwise by `pass`."""
        assert node.end_lineno is not None, "parsed nodes have an end"
        begin, end = self._line_starts[node.lineno - 1], self._line_starts[node.end_lineno]
        rest = self.data[self.stop(node) : end].strip()
        if node.col_offset == 0 and (not rest or rest.startswith(b"#")):
            return Edit(begin, end)
        return Edit(self.start(node), self.stop(node), b"pass")

    def with_edits(self, edits: list[Edit]) -> str:
        data = self.data
        for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
            data = data[: edit.start] + edit.text + data[edit.stop :]
        return data.decode()


class AutoDistLines(ast.NodeVisitor):
    """Collects the edits that take AutoDist out of a script."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.edits: list[Edit] = []
        # The names of AutoDist objects, collected first: a function may use one above the line that makes it.
        made = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign) and _makes_autodist(node.value)]
        self.names = {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}

    def visit_Import(self, node: ast.Import) -> None:
        ours = [alias.name.split(".")[0] == "autodist" for alias in node.names]
        if any(ours) and not all(ours):
            raise LeftOverError(node.lineno, ast.unparse(node))
        if any(ours):
            self.edits.append(self.source.nothing(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "autodist":
            self.edits.append(self.source.nothing(node))

    def visit_Assign(self, node: ast.Assign) -> None:
        if not _makes_autodist(node.value):
            self.generic_visit(node)
        elif all(isinstance(target, ast.Name) for target in node.targets):
            self.edits.append(self.source.nothing(node))
        else:  # for example an attribute, whose uses cannot be attributed to AutoDist
            raise LeftOverError(node.lineno, ast.unparse(node))

    def visit_With(self, node: ast.With) -> None:
        scopes = [item for item in node.items if self._method(item.context_expr) == "scope"]
        if any(item.optional_vars for item in scopes):
            raise LeftOverError(node.lineno, ast.unparse(node.items[0]))
        if scopes and len(node.items) == 1:
            stop = self.source.stop(scopes[0].context_expr)
            self.edits.append(Edit(self.source.start(node), stop, b"if True"))
        elif scopes:
            self.edits.append(self._without_scope(node.items))
        for child in [*(item for item in node.items if item not in scopes), *node.body]:
            self.visit(child)

    def visit_Expr(self, node: ast.Expr) -> None:
        if self._method(node.value) in DROPPED:
            self.edits.append(self.source.nothing(node))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = self._method(node)
        if method in CALLS:
            self._replace(node, CALLS[method].encode())
        elif method in FIRST_ARGUMENT and node.args:
            self._keep_only(node.args[0], node)
        elif method == "function":
            self._plain_function(node)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in self.names):
            self.generic_visit(node)
        elif node.attr in VALUES:
            self._replace(node, VALUES[node.attr].encode())
        else:
            raise LeftOverError(node.lineno, ast.unparse(node))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.names or node.id in ("AutoDist", "autodist"):
            raise LeftOverError(node.lineno, node.id)

    def _replace(self, node: ast.expr, text: bytes) -> None:
        self.edits.append(Edit(self.source.start(node), self.source.stop(node), text))

    def _keep_only(self, argument: ast.expr, call: ast.Call) -> None:
        """Replaces the call by an argument, in parentheses if a neighbouring operator could split it."""
        atom = isinstance(argument, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        left, right = (b"", b"") if atom else (b"(", b")")
        self.edits.append(Edit(self.source.start(call), self.source.start(argument), left))
        self.edits.append(Edit(self.source.stop(argument), self.source.stop(call), right))
        self.visit(argument)

    def _plain_function(self, call: ast.Call) -> None:
        """Replaces the call by `tf.function` with the common arguments; without parentheses if none are left."""
        given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        goes = [isinstance(one, ast.keyword) and one.arg in OF_MANY_DEVICES for one in given]
        if all(goes):
            self._replace(call, VALUES["function"].encode())
            return
        first_kept = goes.index(False)
        for at, one in enumerate(given):
            if not goes[at]:
                if isinstance(one, ast.keyword) and one.arg == "step":
                    self.edits.append(Edit(self.source.start(one), self.source.start(one.value), b"func="))
                self.visit(one)
            elif at < first_kept:
                self.edits.append(Edit(self.source.start(one), self.source.start(given[at + 1])))
            else:
                self.edits.append(Edit(self.source.stop(given[at - 1]), self.source.stop(one)))
        self.visit(call.func)

    def _without_scope(self, items: list[ast.withitem]) -> Edit:
        """Removes the scope, and one adjacent comma, from a `with` of several items."""
        at = next(i for i, item in enumerate(items) if self._method(item.context_expr) == "scope")
        if at == 0:
            return Edit(self.source.start(items[0].context_expr), self.source.start(items[1].context_expr))
        before = items[at - 1].optional_vars or items[at - 1].context_expr
        return Edit(self.source.stop(before), self.source.stop(items[at].context_expr))

    def _method(self, node: ast.expr) -> str | None:
        """Returns the name of the AutoDist method that an expression calls, or None."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in self.names:
                return method
        return None


def _makes_autodist(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="AutoDist") | ast.Attribute(attr="AutoDist")):
            return True
    return False


def without_autodist(text: str) -> str:
    """Returns the script `text` as it would be written for one device.

    Raises:
        LeftOverError: it uses a part of AutoDist that has no counterpart on one device.
        SyntaxError: the script, or the result, is not valid Python.
    """
    source = Source(text)
    lines = AutoDistLines(source)
    lines.visit(source.tree)
    result = source.with_edits(lines.edits)
    ast.parse(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a script with its AutoDist lines taken out.")
    parser.add_argument("script", type=pathlib.Path)
    path = parser.parse_args().script
    try:
        sys.stdout.write(without_autodist(path.read_text(encoding="utf-8")))
    except LeftOverError as error:
        sys.exit(f"{path}: {error}")


if __name__ == "__main__":
    main()

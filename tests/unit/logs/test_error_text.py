"""The text of errors within AutoDist's messages."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.logs.formatting import summary_of, words_of


def read(path: str) -> tf.Tensor:
    return tf.raw_ops.ReadFile(filename=path)


def read_in_a_session(path: str) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(read(path))


WAYS = {"eagerly": read, "in a function": tf.function(read), "in a session": read_in_a_session}


@pytest.mark.parametrize("way", WAYS)
def test_what_tensorflow_raises_is_a_line_without_where_the_graph_was_made(way: str) -> None:
    with pytest.raises(tf.errors.NotFoundError) as caught:
        WAYS[way]("/nowhere/file")
    assert words_of(caught.value) == "/nowhere/file; No such file or directory"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "2 root error(s) found.\n  (0) NOT_FOUND: no file\n\t [[{{node a}}]]\n  (1) INTERNAL: no disk\n"
            "0 successful operations.\n0 derived errors ignored.",
            "(0) NOT_FOUND: no file; (1) INTERNAL: no disk",
        ),
        (
            "\n===========\nINVALID_ARGUMENT: From /job:worker/replica:0/task:1:\nno number\n\t [[{{node a}}]]\n"
            "INVALID_ARGUMENT: From /job:worker/replica:0/task:0:\nno number\n\t [[{{node a}}]]\n"
            "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling it:\n"
            ":UNKNOWN:Error received from peer  {grpc_status:3}\n\t [[b]]\n===========\n",
            "no number",
        ),
        ('lost\n:{"created":"@1.2","description":"Failed to pick subchannel","grpc_status":14}', "lost"),
    ],
)
def test_errors_of_several_operations_are_told_once_each(message: str, told: str) -> None:
    assert words_of(tf.errors.InvalidArgumentError(None, None, message)) == told


def test_what_else_is_raised_keeps_its_words() -> None:
    assert words_of(OSError(28, "No space left on device", "/here")) == "[Errno 28] No space left on device: '/here'"


def test_an_exception_whose_text_cannot_be_made_is_named_all_the_same() -> None:
    class Textless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert summary_of(Textless()) == "Textless: <exception str() failed>"

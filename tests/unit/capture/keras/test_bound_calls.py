"""Calls of methods, by the names of their parameters."""

from __future__ import annotations

import inspect

import pytest

from autodist.capture.keras.call_arguments import argument, arguments_of, set_argument, takes, with_bound_arguments


def plain(x: object, callbacks: object = None, **rest: object) -> object:
    return x, callbacks, rest


def test_a_call_is_bound_and_arguments_among_the_rest_are_found_and_set() -> None:
    def call(bound: inspect.BoundArguments) -> object:
        assert (argument(bound, "x"), argument(bound, "verbose"), argument(bound, "epochs")) == (1, 2, None)
        assert arguments_of(bound)["verbose"] == 2
        set_argument(bound, "callbacks", ["ours"])
        set_argument(bound, "epochs", 3)
        return plain(*bound.args, **bound.kwargs)

    wrapped = with_bound_arguments(plain, call)
    assert wrapped(1, verbose=2) == (1, ["ours"], {"verbose": 2, "epochs": 3})
    assert wrapped.__name__ == "plain" and inspect.signature(wrapped) == inspect.signature(plain)


def test_a_call_that_does_not_fit_gets_the_method_s_own_error() -> None:
    wrapped = with_bound_arguments(plain, lambda bound: pytest.fail("it was bound"))
    with pytest.raises(TypeError, match=r"plain\(\) missing 1 required positional argument: 'x'"):
        wrapped(callbacks=[])


def test_a_parameter_is_taken_by_name_or_among_the_rest() -> None:
    assert takes(inspect.signature(plain), "verbose")
    assert not takes(inspect.signature(lambda x: x), "verbose")

"""Numbers, true, false and null of YAML 1.1, without those that people read as something else."""

from __future__ import annotations

import re
from typing import Any

import yaml

from autodist.resources._limits import LONG_NUMBER, is_long_number, shown

TAG = "tag:yaml.org,2002:"

_OCTAL = re.compile(r"[-+]?0[0-7_]+\Z")
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def number_of(node: yaml.ScalarNode, is_secret: bool = False) -> Any:
    """The value of a node that is tagged as int, float, bool or null.

    Args:
        node: a scalar.
        is_secret: whether its text must not stand in a message.

    Raises:
        ValueError: with the reason and the mend: not of its type, too long, or a number that YAML 1.1 reads with
            another base than people and YAML 1.2 do (`1:20:30` is 4830, `010` is 8).
    """
    given = "this" if is_secret else shown(node.value)
    is_number = node.tag in (TAG + "int", TAG + "float")
    if is_number and is_long_number(node.value):
        raise ValueError(f"{given} {LONG_NUMBER}")
    try:
        value = _CONSTRUCTOR.construct_object(node)
    except (ValueError, KeyError, IndexError) as error:  # as for `!!int abc`, `!!bool abc`, `!!int ""`
        mend = "remove the tag, or put the text in quotes"
        raise ValueError(f"{given} is not of the type that its tag says; {mend}") from error
    if isinstance(value, int) and is_long_number(value):
        raise ValueError(f"{given} {LONG_NUMBER}")
    means, quotes = "" if is_secret else f", {value}", "or put it in quotes if it is text"
    if is_number and ":" in node.value:
        raise ValueError(f"{given} is a number to the base of 60 in YAML{means}; write a plain number, {quotes}")
    if isinstance(value, int) and _OCTAL.match(node.value) and value != (plain := int(node.value.replace("_", ""))):
        meant = "" if is_secret else f" (or {plain}, if that is meant)"
        mend = f"write it without the leading 0{meant}, {quotes}"
        raise ValueError(f"{given} is an octal number in YAML{means}; {mend}")
    return value

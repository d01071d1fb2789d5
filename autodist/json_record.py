"""Values that processes exchange as JSON: messages between workers, and settings in environment variables."""

from __future__ import annotations

import functools
import json
from typing import Any, Self

from pydantic import TypeAdapter


class JSONRecord:
    """Base of a frozen dataclass that is encoded as JSON; its fields may be dataclasses, tuples and enumerations.

    The standard library's JSON represents lone surrogates, which Python uses in names of files; pydantic's does not. In
    keys of mappings they are replaced.
    """

    def encode(self) -> bytes:
        """Returns the record as JSON, on one line."""
        return json.dumps(self._adapter().dump_python(self, mode="json")).encode()

    @classmethod
    def decode(cls, content: str | bytes) -> Self:
        """Returns the record in the result of `encode`.

        Raises:
            ValueError: the content is not such a record.
        """
        record: Self = cls._adapter().validate_python(json.loads(content))
        return record

    @classmethod
    @functools.cache
    def _adapter(cls) -> TypeAdapter[Any]:
        return TypeAdapter(cls)

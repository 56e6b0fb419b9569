"""Reads pickles of plain values from untrusted files: numbers, texts, None, lists, tuples and
dictionaries.

A pickle that names a class or function is refused, so nothing of the file is executed.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from zpasses.dumps.dump_errors import DamagedDumpError


def load_plain_pickle(data: bytes, path: Path) -> Any:
    """The value of a pickle.

    Args:
        data: the pickle.
        path: its file, for errors.

    Raises:
        DamagedDumpError: if it is damaged, or has anything but plain values.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise DamagedDumpError(
            f"{path}: names {error}; expected the plain values of a flight recorder. Nothing of it "
            "was executed."
        ) from error
    except Exception as error:  # damage raises all kinds
        raise DamagedDumpError(
            f"{path}: is a damaged pickle ({str(error)[:200]}). Copy it again."
        ) from error


class _RefusedError(Exception):
    """A class or function that a pickle names."""


# The one in C reserves memory for as many values as the file says that it has.
class _PlainUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _RefusedError(f"{module}.{name}")

"""The files that a command reads and writes, checked before it computes anything.

Owns what may be read (a regular file) and written (no input, no other output, no folder, no pipe), and that an error
while writing names its file. Knows nothing of what is in them. Laws: tests/test_files.py.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Outputs = Sequence[tuple[str, Path | None]]  # (flag, path; None: not asked for)


def file_argument(text: str) -> Path:
    """For argparse."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file")
    return Path(text)


def check_inputs(paths: Iterable[Path]) -> None:
    """ValueError for what is no regular file: a pipe or a device may never end. OSError where there is none."""
    for path in paths:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is {_kind(mode)}, and a file is read; write what it holds to one first.")


def check_outputs(outputs: Outputs, inputs: Sequence[Path] = ()) -> None:
    """ValueError for a path that would overwrite an input or another output, or that nothing can be written to."""
    given = [(flag, path) for flag, path in outputs if path is not None]
    for place, (flag, path) in enumerate(given):
        if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
            raise ValueError(f"{flag} {path} is in a folder that does not exist; make it first.")
        if path.is_dir() or path.is_fifo() or path.is_socket() or path.is_block_device():
            raise ValueError(f"{flag} {path} is {_kind(path.stat().st_mode)}; give the path of a file.")
        if read := next((one for one in inputs if is_same(path, one)), None):
            raise ValueError(f"{flag} {path} is {read}, which is read and would be overwritten; give another path.")
        if other := next((name for name, one in given[:place] if is_same(path, one)), None):
            raise ValueError(f"{flag} {path} is the file of {other} too; give each a path of its own.")


def refuse_device(flag: str, path: Path | None) -> None:
    """ValueError for a device, where the path is one to make others from."""
    if path is not None and path.is_char_device():
        raise ValueError(f"{flag} {path} is a device; give the path of a file.")


def is_same(one: Path, other: Path) -> bool:
    """Whether both name one file, by whatever links; also where it is yet to be made."""
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system while writing name the file: a full disk does not tell which it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """OSError that names the file."""
    with naming(path):
        path.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")

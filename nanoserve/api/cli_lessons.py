"""`nanoserve lessons`: JupyterLab on a copy of the lessons and exercises, so that the installed ones stay as they are.

Knows where they lie (`lessons_dir`, and the exercises' own) and what each says of itself, in its notebook's metadata.
A copy that is there already is the reader's own and is kept. Laws: tests/test_lessons.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import msgspec

from nanoserve.lab.check_exercises import exercises_dir

DEFAULT_DIR = "nanoserve-lessons"
EXERCISES_DIR = "exercises"  # in the folder of the copies


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `--list`; `minutes` are the reader's."""

    name: str
    title: str
    question: str
    minutes: int
    seams: str
    needs: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--list", action="store_true", help="what each lesson and exercise asks, how long it takes, what it needs"
    )
    parser.add_argument("--dir", default=DEFAULT_DIR, metavar="FOLDER", help="of your copies (default: ./%(default)s)")
    parser.add_argument("--copy", action="store_true", help="only write the copies; open nothing")
    parser.add_argument("--no-browser", action="store_true", help="start JupyterLab, and only print its address")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")


def run(args: argparse.Namespace) -> int:
    if args.json and not args.list:
        raise ValueError("--json means nothing without --list; add --list.")
    if args.list:
        _show([*read_lessons(), *read_exercises()], args.json)
        return 0
    folder = Path(args.dir)
    for path, is_new in copy_lessons(folder):
        print(f"{path}{'' if is_new else ' (yours, kept)'}")
    return 0 if args.copy else _open_lab(folder, args.no_browser)


def lessons_dir() -> Path:
    """In an installed package a part of it; in a clone, beside it. ValueError when they are nowhere."""
    package = Path(str(files("nanoserve")))
    for folder in (package / "lessons", package.parent / "lessons"):
        if any(folder.glob("*.ipynb")):
            return folder
    raise ValueError("the lessons are not installed; reinstall nanoserve, or take them from its repository.")


def read_lessons() -> list[Lesson]:
    """In order of their numbers."""
    return [_read(path) for path in sorted(lessons_dir().glob("*.ipynb"))]


def read_exercises() -> list[Lesson]:
    """The same, of the exercises."""
    return [_read(path) for path in sorted(exercises_dir().glob("*.ipynb"))]


def copy_lessons(folder: Path) -> list[tuple[Path, bool]]:
    """Every lesson into that folder, and every exercise into a folder in it; both are made if need be. (Where, it was
    not there before) for each. OSError."""
    copies = []
    for source, target in ((lessons_dir(), folder), (exercises_dir(), folder / EXERCISES_DIR)):
        target.mkdir(parents=True, exist_ok=True)
        copies += [_copy(path, target / path.name) for path in sorted(source.glob("*.ipynb"))]
    return copies


def _copy(path: Path, copy: Path) -> tuple[Path, bool]:
    is_new = not copy.exists()
    if is_new:
        shutil.copyfile(path, copy)
    return copy, is_new


def _read(path: Path) -> Lesson:
    facts = json.loads(path.read_text(encoding="utf-8"))["metadata"]["nanoserve"]
    return msgspec.convert({**facts, "name": path.stem}, Lesson)


def _show(lessons: list[Lesson], as_json: bool) -> None:
    if as_json:
        print(json.dumps([msgspec.to_builtins(lesson) for lesson in lessons], indent=2))
        return
    for lesson in lessons:
        print(f"{lesson.name}: {lesson.title}")
        print(f"    {lesson.question}")
        print(f"    {lesson.minutes} minutes; seams: {lesson.seams}; needs {lesson.needs}")


def _open_lab(folder: Path, no_browser: bool) -> int:
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed; pip install 'nanoserve[lessons]', or use --copy.")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}"]
    command += ["--no-browser"] if no_browser else []
    command += ["--allow-root"] if os.geteuid() == 0 else []  # as in most containers; it listens on this machine only
    with subprocess.Popen(command) as lab:
        while True:
            try:
                return lab.wait()
            except KeyboardInterrupt:
                continue  # the terminal told JupyterLab too, which asks first and then ends its kernels

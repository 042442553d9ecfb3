"""Laws about the project as a whole: what an import costs, which way imports run, what no file may hold."""

import ast
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanoserve"
QUICK_S = 0.3


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def best_cpu_s(command: list[str], runs: int = 5) -> float:
    """CPU seconds of a whole process, the quickest of some runs.

    On an idle machine that is its wall time: an import waits for nothing. On a busy one only this is a fact about
    the program.
    """
    best = float("inf")
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    return best


# --- What an import costs


def test_bare_import_is_quick() -> None:
    assert best_cpu_s([sys.executable, "-c", "import nanoserve"]) < QUICK_S


def test_bare_import_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, nanoserve; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_help_is_quick() -> None:
    script = Path(sys.executable).with_name("nanoserve")
    assert best_cpu_s([str(script), "--help"]) < QUICK_S


@pytest.mark.parametrize("module", ["request", "config", "scheduler", "blocks", "client", "core", "messages"])
def test_this_side_of_the_runner_imports_no_torch(module: str) -> None:
    code = f"import sys, nanoserve.{module}; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_public_names_come_from_their_home_modules() -> None:
    code = """
        import sys
        from nanoserve import STAGES, EngineConfig, SamplingParams
        import nanoserve, nanoserve.config, nanoserve.request
        assert EngineConfig is nanoserve.config.EngineConfig and STAGES is nanoserve.config.STAGES
        assert SamplingParams is nanoserve.request.SamplingParams
        assert "torch" not in sys.modules, "only LLM may bring torch"
        from nanoserve import LLM
        assert LLM is sys.modules["nanoserve.api.llm"].LLM
        assert set(nanoserve.__all__) <= set(dir(nanoserve))
        assert not hasattr(nanoserve, "no_such_name")
    """
    run_python(textwrap.dedent(code))


# --- Which way imports run


def imported_modules(path: Path) -> Iterator[str]:
    """Every module an import statement of this file names, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import of {node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outward_imports(path: Path) -> list[str]:
    return [name for name in imported_modules(path) if re.match(r"nanoserve\.(api|lab)\b", name)]


def engine_files() -> list[Path]:
    facade = {"__init__.py", "__main__.py"}  # the package's own front door
    return sorted(path for path in PACKAGE.glob("*.py") if path.name not in facade)


def test_the_engine_imports_neither_api_nor_lab() -> None:
    files = engine_files()
    assert files, "no engine modules found"
    assert {path.name: found for path in files if (found := outward_imports(path))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from nanoserve import lab",
        "import nanoserve.api.llm",
        "def f():\n    from nanoserve.lab import trace",
    ],
)
def test_a_planted_outward_import_is_seen(line: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line + "\n")
    assert outward_imports(path) != []


# --- What a file may not hold

# Written so that no pattern matches its own source.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:root|work|home/\w+|Users/\w+|opt/(?:wheels|pypi))(?:/|\b)(?![\w-])")
PACKAGE_HOST = re.compile(
    r"pypi\.org|pythonhosted\.|download\.pytorch\.|npmjs\.(?:org|com)|deb\.debian\.|anaconda\.(?:org|com)"
    r"|--(?:extra-)?index-url|--find[-]links|registry[=]\s*http"
)


def project_files() -> list[Path]:
    """What is in git or could be added to it; without git (an unpacked archive), what is not hidden."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        found = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        top = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
        found = [*top, *(path for folder in top for path in folder.rglob("*"))]
    return [path for path in found if path.is_file()]


def unwanted(text: str) -> list[str]:
    return [m.group() for pattern in (MACHINE_PATH, PACKAGE_HOST) for m in pattern.finditer(text)]


def test_no_file_names_a_machine_path_or_a_package_host() -> None:
    files = project_files()
    assert ROOT / "pyproject.toml" in files
    found = {}
    for path in files:
        data = path.read_bytes()
        if b"\0" not in data and (hits := unwanted(data.decode("utf-8", errors="replace"))):
            found[str(path.relative_to(ROOT))] = hits[:5]
    assert found == {}


@pytest.mark.parametrize(
    "parts",
    [("see /ro", "ot/notes"), ("'/wo", "rk/main/x'"), ("/ho", "me/ada/x"), ("https://py", "pi.org/simple")],
)
def test_a_planted_path_or_host_is_seen(parts: tuple[str, str]) -> None:
    assert unwanted("".join(parts)) != []


@pytest.mark.parametrize("text", ["lessons/work/one.py", "https://example.org/work/x", "~/work/x", "/tmp/out"])
def test_ordinary_paths_are_left_alone(text: str) -> None:
    assert unwanted(text) == []


# --- Skips

NEEDED = {"needs_cxx": "no C++ compiler", "needs_chromium": "no Chromium"}
ALLOWED = {marker: f"@pytest.mark.{marker}\ndef test_it(): pass" for marker in [*NEEDED, "gpu"]}
REFUSED = {
    "call": "def test_it(): pytest.skip('not today')",
    "mark": "@pytest.mark.skip\ndef test_it(): pass",
    "condition": "@pytest.mark.skipif(True, reason='not today')\ndef test_it(): pass",
    "xfail": "@pytest.mark.xfail(reason='not today')\ndef test_it(): assert False",
    "importorskip": "pytest.importorskip('no_such_module')",
    "module": "pytest.skip('not today', allow_module_level=True)",
}


def run_planted_suite(folder: Path, bodies: dict[str, str], *, ci: bool) -> tuple[int, str]:
    """pytest on one file per body, under our conftest.py, on a machine without compiler and browser."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    for name, body in bodies.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{body}\n")
    env = {**os.environ, "CI": "true" if ci else "", "CXX": "no-such-compiler", "PATH": str(folder)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the start-up time
    command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command += [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "--continue-on-collection-errors",
    ]
    done = subprocess.run(
        [*command, str(folder)], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


def failed(name: str, output: str) -> bool:
    return re.search(rf"^(FAILED|ERROR) test_{name}\.py", output, re.MULTILINE) is not None


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_planted_suite(tmp_path_factory.mktemp("home"), ALLOWED | REFUSED, ci=False)[1]


@pytest.fixture(scope="module")
def in_ci(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_planted_suite(tmp_path_factory.mktemp("ci"), ALLOWED | REFUSED, ci=True)[1]


def test_allowed_skips_are_counted_and_pass(tmp_path: Path) -> None:
    code, output = run_planted_suite(tmp_path, ALLOWED, ci=False)
    assert code == 0, output
    assert all(f"    1  {reason}\n" in output for reason in NEEDED.values()), output


@pytest.mark.parametrize(("marker", "reason"), NEEDED.items())
def test_a_missing_tool_is_a_skip_at_home_and_a_failure_in_ci(
    marker: str, reason: str, at_home: str, in_ci: str
) -> None:
    assert f"    1  {reason}\n" in at_home
    assert not failed(marker, at_home)
    assert failed(marker, in_ci)
    assert f"skipped ({reason}), which counts as a failure" in in_ci


def test_a_missing_gpu_is_never_a_failure(at_home: str, in_ci: str) -> None:
    assert not failed("gpu", at_home)
    assert not failed("gpu", in_ci)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_skip_is_a_failure(name: str, at_home: str, in_ci: str) -> None:
    assert failed(name, at_home)
    assert failed(name, in_ci)

"""Set-up that every test shares, and an account of every skip.

A test may be skipped for one of three things that a machine can lack: a GPU, a C++ compiler, Chromium. Any
other skip, and an expected failure too, is a failure here; with CI set, only the GPU may be missing. Slow tests
are deselected (`-m "not slow"`), not skipped. Nothing here imports torch: the tests of the scheduler and of the
blocks run without it.
"""

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

# Set before anything reads them; what the caller has set stays. For tiny models one thread beats a barrier.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "TRITON_INTERPRET": "1",  # read when kernels are imported
}.items():
    os.environ.setdefault(name, value)

# No deadline: a loaded machine is not a bug. In CI the same examples run every time.
hypothesis.settings.register_profile(
    "nanoserve", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("nanoserve")


@functools.cache
def has_gpu() -> bool:
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return False
    import torch  # only on a machine with a GPU, for a test that will import it anyway

    return torch.cuda.is_available()


@functools.cache
def find_cxx() -> str | None:
    """The C++ compiler: $CXX, else the first of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


@functools.cache
def find_chromium() -> str | None:
    names = ["chromium", "chromium-browser", "google-chrome"]
    return next(filter(None, map(shutil.which, names)), None)


# marker -> (is the thing there?, the reason of a skip)
NEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "gpu": (has_gpu, "no GPU"),
    "needs_cxx": (find_cxx, "no C++ compiler"),
    "needs_chromium": (find_chromium, "no Chromium"),
}


def allowed_reasons() -> list[str]:
    return ["no GPU"] if os.environ.get("CI") else [reason for _, reason in NEEDS.values()]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser; for tests marked `needs_chromium`."""
    path = find_chromium()
    assert path is not None, "a test that drives a browser is marked needs_chromium"
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (is_there, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not is_there():
            pytest.skip(reason)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why this report counts as skipped; None when it does not."""
    if not report.skipped:
        return None
    if hasattr(report, "wasxfail"):
        return f"expected failure {report.wasxfail}".rstrip()
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").removeprefix("Skipped").strip() or "no reason given"


def refuse_other_skips(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = skip_reason(report)
    if reason is None or reason in allowed_reasons():
        return
    vars(report).pop("wasxfail", None)
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid}: skipped ({reason}), which counts as a failure: "
        f"here a skip is allowed for {' or '.join(allowed_reasons())} only (tests/conftest.py)"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_other_skips(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_other_skips(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("skips by reason")
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")
    if not counts:
        terminalreporter.write_line("    0  nothing was skipped")

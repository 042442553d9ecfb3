"""`scripts/gpu_check.sh`: looks at the machine, fetches what it lacks, runs the parts, prints one table.

Standard library only. Exit code: 0 if every part that ran passed, 1 if one did not, 2 for what cannot begin.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_check.part import say, write_json
from gpu_check.parts import PARTS, chosen, is_good, run_parts
from gpu_check.wheels import ROOT, WHEEL_LIST, install, least_versions, missing, numbers, pinned

RESULTS = ROOT / "benchmarks" / "results"
LEAST = {"torch": "2.11", "triton": "3.6"}
PROBE_TIMEOUT_S = 120.0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--only", metavar="A,B", help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: benchmarks/results/gpu-<device>")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="instead of its share")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU; chosen where there is no GPU")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # parts are ended on the way out
    try:
        parts = chosen(args.only, args.limit)
        with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
            env = environment(Path(folder))
            fetch_missing(Path(folder) / "packages", began_s)
            machine = look_at_machine(env)
            dry = is_dry(args.dry, machine, began_s)
            out = output_folder(args.out, machine, dry)
            reports = run_parts(parts, out, machine=machine, dry=dry, env=env, cwd=ROOT, began_s=began_s)
    except (ValueError, RuntimeError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    total_s = time.monotonic() - began_s
    write_json(out / "summary.json", summarise(argv, machine, dry, total_s, reports))
    print(table(machine, dry, total_s, reports))
    say(began_s, f"reports are in {out}")
    return 0 if is_good(reports) else 1


def environment(folder: Path) -> dict[str, str]:
    """Of every process. What it keeps in caches and leaves in temporary files is gone afterwards."""
    (folder / "tmp").mkdir()
    places = [folder / "packages", ROOT, ROOT / "scripts", ROOT / "tests"]
    given = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, places), *([given] if given else [])]),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        "TRITON_INTERPRET": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def fetch_missing(target: Path, began_s: float) -> None:
    """Install what is not there. RuntimeError that says how to get it, when there is no folder to take it from."""
    wanted = missing(pinned(), least_versions())
    if not wanted:
        return
    wheels = os.environ.get("WHEELS")
    if not wheels or not Path(wheels).is_dir():
        given = f"WHEELS={wheels} is no folder" if wheels else "WHEELS is not set"
        raise RuntimeError(
            f"this Python ({sys.executable}) lacks {', '.join(wanted)}, and {given}; set it to a folder with their "
            f"wheels ({WHEEL_LIST.name} says how to fill one), or install them."
        )
    say(began_s, f"installing {', '.join(wanted)} from {wheels}")
    install(wanted, Path(wheels).resolve(), target)


def look_at_machine(env: dict[str, str]) -> dict[str, Any]:
    """RuntimeError for a machine that the check does not run on."""
    command = [sys.executable, "-m", "gpu_check.machine"]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"torch does not work in {sys.executable} ({reason}); name another Python (PYTHON=...).")
    machine = json.loads(done.stdout.strip().splitlines()[-1])
    for package, least in LEAST.items():
        version = machine[package]
        is_needed = package == "torch" or machine["device"] is not None
        if is_needed and (version is None or numbers(version) < numbers(least)):
            raise RuntimeError(f"{package} {version or 'is absent'} does not do; {least} or newer is needed.")
    return machine


def is_dry(asked: bool, machine: dict[str, Any], began_s: float) -> bool:
    if asked:
        say(began_s, "dry, as asked: tiny sizes on the CPU; no figure below means anything")
    elif machine["device"] is None:
        say(began_s, "dry: torch sees no GPU here; tiny sizes on the CPU, and no figure below means anything")
    else:
        say(began_s, "on " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    return asked or machine["device"] is None


def output_folder(given: Path | None, machine: dict[str, Any], dry: bool) -> Path:
    """The folder, made. ValueError for a dry check among results."""
    if dry and given is not None and given.resolve().is_relative_to(RESULTS):
        raise ValueError(f"--out {given}: what a dry check finds is no result; name a folder outside {RESULTS.name}/.")
    if given is not None:
        out = given.resolve()
    elif dry:
        out = Path(tempfile.mkdtemp(prefix="gpu-check-dry-"))
    else:
        out = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', machine['device'].lower()).strip('-')}"
    out.mkdir(parents=True, exist_ok=True)
    return out


def summarise(
    argv: list[str], machine: dict[str, Any], dry: bool, total_s: float, reports: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    shown = ("status", "seconds", "limit_s", "failures", "not_run", "skipped", "lines")
    return {
        "what": "what only a GPU can show: kernels, graphs, ladder, speed, step gap",
        "command": shlex.join(["scripts/gpu_check.sh", *argv]),
        "dry": dry,
        "machine": machine,
        "total_s": round(total_s, 1),
        "passed": is_good(reports),
        "parts": {name: {key: report[key] for key in shown} for name, report in reports.items()},
    }


def table(machine: dict[str, Any], dry: bool, total_s: float, reports: dict[str, dict[str, Any]]) -> str:
    """Markdown: what each part found, then what it did not do, and why."""
    device = "a CPU, dry" if dry else f"{machine['device']}, driver {machine['driver']}"
    about = f"{device}; torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}"
    rows = []
    for name, report in reports.items():
        rows.append((name, "**" + report["status"] + "**", f"{report['seconds']:.1f} s of {report['limit_s']:g} s"))
        rows += [(name, what, figure) for what, figure in report["lines"]]
        for kind in ("failures", "not_run", "skipped"):
            label = {"failures": "FAILED", "not_run": "not run", "skipped": "skipped"}[kind]
            rows += [(name, what, f"{label}: {why.splitlines()[0]}") for what, why in report[kind].items()]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([f"{about}; {total_s:.0f} s", "", "| part | what | figure |", "|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

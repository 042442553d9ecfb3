#!/usr/bin/env bash
# What only a GPU can show, in one command of less than nine minutes: kernels against their twins, graphs against eager
# steps, the ladder at real shapes, speed against the limits of the device, the gap between steps in each layout.
#
#     scripts/gpu_check.sh [--only kernels,graphs,ladder,speed,step_gap] [--out DIR] [--limit PART=SECONDS] [--dry]
#
# Needs an NVIDIA GPU, torch >= 2.11, triton >= 3.6 and Python 3.11-3.13; no network. Packages that are missing come
# from the folder WHEELS (gpu_wheels.txt lists them and says how to fill it). PYTHON names another interpreter. Without
# a GPU it runs dry: every part, with tiny sizes, as far as a CPU goes.
set -euo pipefail

case "${BASH_SOURCE[0]}" in
  */*) folder="${BASH_SOURCE[0]%/*}" ;;
  *) folder=. ;;
esac
folder="$(CDPATH='' cd -- "$folder" && pwd)"
export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpu_check: Python 3.11 or newer is needed, this is "
  + sys.version.split()[0] + ": set PYTHON")'
exec "$python" -P -m gpu_check "$@"

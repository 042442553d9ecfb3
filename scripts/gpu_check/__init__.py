"""The parts of `scripts/gpu_check.sh`, and what runs them. `parts.py` starts each in a process of its own."""

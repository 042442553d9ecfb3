"""`python -m nanoserve` is the `nanoserve` command."""

from nanoserve.api.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

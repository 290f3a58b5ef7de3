"""``python -m experiments``: the command line, without an installed script."""

from experiments.cli import main

if __name__ == "__main__":
    main()

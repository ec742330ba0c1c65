"""The command ``wherewhat``, and ``python -m wherewhat``, which is the same."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from wherewhat.cli.main import main as run
    except KeyboardInterrupt:  # the libraries behind the command line take a moment to import
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

"""``python -m wherewhat`` is the same as ``wherewhat``."""

from wherewhat.cli.main import main

if __name__ == "__main__":
    main()

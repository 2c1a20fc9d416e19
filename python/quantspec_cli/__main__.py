"""Starts the command line. Imports nothing at first, so that Ctrl-C during imports does not end in a traceback."""

import sys


def main() -> None:
    """The `quantspec` command."""
    try:
        from .entry import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\nhint: run the command again\n")
        code = 130
    if code in {129, 130, 143}:  # SIGHUP, Ctrl-C, SIGTERM
        # A normal exit would wait for threads of an interrupted download or tokenizer.
        import os

        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

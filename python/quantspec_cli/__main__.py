"""Starts the command line. Imports nothing at first, so that Ctrl-C during imports does not end in a traceback."""

import sys


def main() -> None:
    """The `quantspec` command."""
    try:
        from .entry import main as run
    except (KeyboardInterrupt, RuntimeError) as error:
        # Before version 3.12 Python converts an exception raised while a class is made.
        if KeyboardInterrupt not in {type(error), type(error.__cause__)}:
            raise
        code = _interrupted(as_json="--json" in sys.argv)
    else:
        try:
            code = run()
        except KeyboardInterrupt:  # after its output
            code = _interrupted(as_json=False)
    if code in {129, 130, 143}:  # SIGHUP, Ctrl-C, SIGTERM
        # A normal exit would wait for threads of an interrupted download or tokenizer.
        import os

        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupted(*, as_json: bool) -> int:
    """Reports Ctrl-C as `errors.interrupted` does, without an import. Returns the exit code."""
    sys.stderr.write("error: interrupted\nhint: run the command again\n")
    if as_json:
        error = '"kind": "interrupted", "message": "interrupted", "hint": "run the command again", "exit_code": 130'
        sys.stdout.write(f'{{"error": {{{error}}}}}\n')
        sys.stdout.flush()
    return 130


if __name__ == "__main__":
    main()

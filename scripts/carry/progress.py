"""Progress lines for the person at the terminal, on stderr, so that stdout stays data."""

import sys


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""`python -m launch`: the same as `rocstar`."""

import sys

from launch import early


def main() -> None:
    """Listens for signals first: what the command imports takes seconds."""
    if early.listens(sys.argv[1:]):
        early.listen()
    from launch import cli

    cli.main()


if __name__ == "__main__":
    main()

"""`python -m launch`: the same as `rocstar`."""

from launch.cli import main

main()

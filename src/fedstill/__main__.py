"""`python -m fedstill` is `fedstill`."""

from fedstill.cli.main import main

main()

"""`python -m hetero` is the `hetero` command."""

from hetero.cli.main import main

main()

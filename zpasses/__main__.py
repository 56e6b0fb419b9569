"""`python -m zpasses` is the command line, `zpasses`."""

from zpasses.tools.cli.main import main

if __name__ == "__main__":
    main()

"""``python -m taskmesh``: the command line."""

from taskmesh.cli.main import main

if __name__ == "__main__":
    main()

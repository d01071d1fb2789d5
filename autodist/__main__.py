"""Entry point of `python -m autodist`, which runs the command `autodist`."""

from autodist.cli.app import main

if __name__ == "__main__":
    main()

"""`python -m isthmus`."""

from isthmus.cli.main import run

if __name__ == "__main__":
    run()

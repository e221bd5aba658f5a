"""Makes `python -m keyloft` the same as `keyloft`."""

from keyloft.cli import main

if __name__ == "__main__":
    main()

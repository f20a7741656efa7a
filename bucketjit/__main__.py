"""``python -m bucketjit``: the command line."""

from bucketjit._api.commands.app import main

if __name__ == "__main__":
    raise SystemExit(main())

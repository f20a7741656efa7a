"""The command line: `app` parses and dispatches, each command is a file of its own."""

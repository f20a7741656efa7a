"""Parses files of sizes: one call a line, one column for each dimension variable."""

from __future__ import annotations

from bucketjit._cli.command import CommandError

_MOST_COLUMNS = 8


def parse_lengths(text: str, source: str) -> dict[str, list[int]]:
    r"""Read the columns of a file of sizes.

    Columns are separated by white space, commas or semicolons. Empty lines, and what follows a
    ``#``, do not count. A first line of names names the columns; without one they are ``n``, or
    ``dim0``, ``dim1`` and so on.

    Args:
        text: The text of the file.
        source: Name of the file in messages.

    Returns:
        The sizes in each column, by its name.

    Raises:
        CommandError: If a line is malformed, or no call has only sizes of at least 1.

    Examples:
        >>> parse_lengths("17\n30  # the second call\n", "lengths.txt")
        {'n': [17, 30]}
        >>> parse_lengths("b, s\n4, 17\n2, 30\n", "lengths.csv")
        {'b': [4, 2], 's': [17, 30]}
    """
    names: list[str] = []
    columns: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").replace(";", " ").split()
        if not words:
            continue
        if not names and all(word.isidentifier() for word in words):
            if len(set(words)) < len(words):
                raise CommandError(f"{source}, line {number}: each column needs a name of its own")
            names = words
            columns = [[] for _ in names]
            continue
        if len(words) > _MOST_COLUMNS:
            raise CommandError(
                f"{source}, line {number}: expected one call a line, with a column for each of at "
                f"most {_MOST_COLUMNS} variables, got {len(words)} columns"
            )
        if not columns:
            names = ["n"] if len(words) == 1 else [f"dim{i}" for i in range(len(words))]
            columns = [[] for _ in names]
        if len(words) != len(columns):
            raise CommandError(
                f"{source}, line {number}: expected {len(columns)} sizes, got {len(words)}"
            )
        for column, word in zip(columns, words, strict=True):
            # Digits alone: int() takes signs, underscores and digits of other scripts too.
            if not (word.isascii() and word.isdigit() and len(word) < 19):
                raise CommandError(f"{source}, line {number}: expected a size, got {word!r}")
            column.append(int(word))
    if not any(all(call) for call in zip(*columns, strict=True)):
        raise CommandError(f"{source} holds no sizes; expected one call a line")
    return dict(zip(names, columns, strict=True))

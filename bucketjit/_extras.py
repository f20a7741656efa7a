"""Imports of optional libraries, with an error that names the extra to install."""

from __future__ import annotations

from types import TracebackType

from bucketjit.errors import MissingExtraError


class Extra:
    """A context for imports of an optional package."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self._message = f"{what} need {package}; install it with: pip install 'bucketjit[{extra}]'"
        self._module = package.replace("-", "_")

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(self._module):
            raise MissingExtraError(self._message) from None

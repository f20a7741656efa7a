"""What other libraries do, which are not always installed."""

from __future__ import annotations

from types import TracebackType

from bucketjit._errors import MissingExtraError


class Extra:
    """Imports inside of this tell which extra to install, if one fails.

    Args:
        what: What need it, such as ``"plots"``.
        package: The package.
        extra: The extra of bucketjit that has it.

    Raises:
        MissingExtraError: The package is not installed.
    """

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

"""Raise errors that name the argument, its value and the remedy."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise ``ValueError(message)`` unless the condition holds.

    A message that names a size comes as a function: torch.compile makes each number that is written out a constant of
    its graph, with a new graph for each, or gives up.
    """
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


def unknown(argument: str, value: object, options: Iterable[str], remedy: str | None = None) -> ValueError:
    """Make the error for a name that is not an option, with the nearest valid one or a remedy.

    Pass a remedy where names are no typing errors: one scaling method must not be suggested for another.

    >>> print(unknown("attention", "coca-exat", ["rope", "coca-exact"]))
    attention must be one of 'rope', 'coca-exact', got 'coca-exat'; did you mean 'coca-exact'?
    """
    names = list(options)
    near = get_close_matches(str(value), map(str, names), n=1, cutoff=0.4)
    hint = remedy or (f"did you mean {near[0]!r}?" if near else "choose one of these")
    return ValueError(f"{argument} must be one of {', '.join(map(repr, names))}, got {value!r}; {hint}")


def require_choice(argument: str, value: object, options: Iterable[str], remedy: str | None = None) -> None:
    """Raise unless the value is one of the options."""
    names = list(options)
    if value not in names:
        raise unknown(argument, value, names, remedy)

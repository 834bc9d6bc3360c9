"""How an op picks its implementation: a table that raises."""

from collections.abc import Callable


def pick_backend(op: str, table: dict[str, Callable], backend: str) -> Callable:
    """The implementation named `backend`; "auto" takes the table's first entry. Raises ValueError on a name the table lacks."""
    if backend == "auto":
        return next(iter(table.values()))
    if backend not in table:
        raise ValueError(f"{op}: backend={backend!r} does not exist; choose auto or one of {', '.join(table)}")
    return table[backend]

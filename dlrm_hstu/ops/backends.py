"""How an op picks its implementation: a table that raises."""

from collections.abc import Callable

from torch import Tensor


def pick_backend(op: str, table: dict[str, Callable], backend: str, tensor: Tensor) -> Callable:
    """The implementation named `backend`; "auto" takes the table's second entry where `tensor` is on a GPU and the first elsewhere.

    Raises ValueError on a name the table lacks.
    """
    if backend == "auto":
        backend = list(table)[tensor.is_cuda]
    if backend not in table:
        raise ValueError(f"{op}: backend={backend!r} does not exist; choose auto or one of {', '.join(table)}")
    return table[backend]

"""Watch the modules of a model while it runs: what enters them, and what leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Look = Callable[[str, Tensor], Tensor | None]
"""Take a module's name and a tensor; return what takes the tensor's place, or None to keep it."""


class _SeenError(Exception):
    """All that was wanted has been seen; ends the forward pass."""


def named(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Return the names of a model's modules of some kinds, in the order of its definition."""
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


@contextmanager
def entering(model: nn.Module, modules: Iterable[str], look: Look) -> Iterator[None]:
    """Show ``look`` the first argument of every call of some modules.

    Parameters
    ----------
    modules
        Their names in the model; "" is the model itself.
    """

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = None if args else next(iter(kwargs), None)
        value = args[0] if args else kwargs.get(key or "")
        put = look(name, value) if isinstance(value, Tensor) else None
        if put is None:
            return None
        return ((put, *args[1:]), kwargs) if key is None else (args, kwargs | {key: put})

    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
        )
        for name in modules
    ]
    with _removed(handles):
        yield


@contextmanager
def leaving(model: nn.Module, modules: Iterable[str], look: Look) -> Iterator[None]:
    """Show ``look`` what every call of some modules returns, where that is a tensor."""

    def after(name: str, made: object) -> Tensor | None:
        return look(name, made) if isinstance(made, Tensor) else None

    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, __, made, name=name: after(name, made)
        )
        for name in modules
    ]
    with _removed(handles):
        yield


def inputs(
    run: Callable[[], object],
    model: nn.Module,
    modules: Iterable[str],
    accepts: Callable[[Tensor], bool] = lambda _: True,
) -> dict[str, Tensor]:
    """Return what entered modules at their first call while ``run`` runs the model, by name.

    Tensors keep their graph. The model runs no further than it must; a module that does not run is
    left out.

    Parameters
    ----------
    accepts
        Inputs of which it returns False are passed over.
    """
    wanted, seen = set(modules), dict[str, Tensor]()

    def note(name: str, value: Tensor) -> None:
        if accepts(value):
            seen.setdefault(name, value)
        if wanted <= seen.keys():
            raise _SeenError

    with entering(model, wanted, note), suppress(_SeenError):
        run()
    return seen


@contextmanager
def _removed(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end, however it comes."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""A model as a chain: affine maps with one elementwise activation between each two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from bract.attacks.methods.r_gap.activations import ACTIVATIONS, Activation
from bract.errors import BractError, apart, first_line
from bract.updates.update import Tensors

_AFFINE = 1e-9


@dataclass(frozen=True)
class Block:
    """An affine map ``u -> z`` of a chain, with parameters inside.

    Attributes
    ----------
    name
        Its first weight, or ``""`` where it has no parameter.
    parameters
        Names of the parameters that it reads.
    shape
        Of ``u``, with a first dimension of 1.
    activation
        What follows it; None at the logits.
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    activation: Activation | None
    nodes: tuple[fx.Node, ...]
    source: fx.Node
    result: fx.Node
    constants: dict[fx.Node, Any]

    def __call__(self, values: Tensor, state: Tensors) -> Tensor:
        """Return ``z`` for ``u`` of the block's shape; differentiable in both."""
        known: dict[fx.Node, Any] = {self.source: values.clone()}
        for node in self.nodes:
            known[node] = self._value(node, known, state)
        found: Tensor = known[self.result]
        return found

    def _value(self, node: fx.Node, known: dict[fx.Node, Any], state: Tensors) -> Any:
        def of(one: fx.Node) -> Any:
            if one in known:
                return known[one]
            if one.op == "placeholder":
                return state[str(one.meta["parameter"])].clone()
            return self.constants[one]

        arguments = fx.node.map_arg(node.args, of)
        keywords = fx.node.map_arg(node.kwargs, of)
        return node.target(*arguments, **keywords)  # type: ignore[operator]


@dataclass(frozen=True)
class Chain:
    """Blocks from the image to the logits."""

    blocks: tuple[Block, ...]


def chain_of(model: nn.Module, state: Tensors, image_shape: Sequence[int]) -> Chain:
    """Trace a model for one image and cut it at its activations.

    Parameters
    ----------
    state
        Parameters and buffers by name, float64 on the CPU; every block is checked on them.
    image_shape
        ``(C, H, W)``.

    Raises
    ------
    BractError
        With what the model has instead: a path around an activation, an operation that is neither
        affine nor a known activation, or something that cannot be traced.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.rand(1, *image_shape, generator=generator, dtype=torch.float64)
    graph, names = _traced(model, state, probe)
    values = _values(graph, names, state, probe)
    after = _depending(graph)
    cuts = [node for node in after if node.op == "call_function" and _name(node) in ACTIVATIONS]
    for cut in cuts:
        _check_bottleneck(cut, after)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    if (logits := _only(output)) in cuts:
        raise BractError(
            f"an activation ({_name(logits)}) makes its logits", code="attack-unsuited"
        )
    ends = [*cuts, logits]
    blocks, start = [], after[0]
    for end in ends:
        blocks.append(_block(start, end, after, values, final=end not in cuts))
        start = end
    for block in blocks:
        _check_affine(block, state, generator)
    _check_shared(blocks)
    return Chain(tuple(blocks))


def _traced(model: nn.Module, state: Tensors, probe: Tensor) -> tuple[fx.Graph, dict[fx.Node, str]]:
    ordered = list(state)

    def run(given: list[Tensor], images: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, dict(zip(ordered, given, strict=True)), (images,))
        return logits

    try:
        with apart():
            graph = make_fx(run)([state[name].clone() for name in ordered], probe).graph
    except Exception as error:  # a third-party forward may raise anything
        raise BractError(
            f"the model cannot be traced for one image: {first_line(error)}", code="attack-unsuited"
        ) from error
    places = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip(places, ordered, strict=False))
    for node, name in names.items():
        node.meta["parameter"] = name
    return graph, names


def _values(
    graph: fx.Graph, names: dict[fx.Node, str], state: Tensors, probe: Tensor
) -> dict[fx.Node, Any]:
    """Return the value of every node for the probe."""
    owner = graph.owning_module
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = (state[names[node]] if node in names else probe).clone()
        elif node.op == "get_attr":
            values[node] = getattr(owner, str(node.target))
        elif node.op == "call_function":
            arguments = fx.node.map_arg(node.args, values.__getitem__)
            keywords = fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
    return values


def _depending(graph: fx.Graph) -> list[fx.Node]:
    """Return the input and what depends on it, in order."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    found = {places[-1]: None}
    for node in graph.nodes:
        if node.op == "call_function" and any(one in found for one in node.all_input_nodes):
            found[node] = None
    return list(found)


def _check_bottleneck(cut: fx.Node, after: Sequence[fx.Node]) -> None:
    place = after.index(cut)
    later = set(after[place:])
    for node in after[place + 1 :]:
        if any(one in after and one not in later for one in node.all_input_nodes):
            raise BractError(
                f"a path leads around the activation {cut.name} (a residual or dense connection)",
                code="attack-unsuited",
            )


def _only(output: fx.Node) -> fx.Node:
    found = output.all_input_nodes
    if len(found) != 1:
        raise BractError("the model returns more than its logits", code="attack-unsuited")
    return found[0]


def _block(
    start: fx.Node, end: fx.Node, after: list[fx.Node], values: dict[fx.Node, Any], *, final: bool
) -> Block:
    last = end if final else end.all_input_nodes[0]
    low, high = after.index(start) + 1, after.index(end) + (1 if final else 0)
    taken = after[low:high]
    inside, constants, parameters = _side_inputs(taken, set(after), values)
    nodes = (*inside, *taken)
    arguments = [a for a in end.args[1:] if isinstance(a, int | float)]
    by_name = {str(n.meta["parameter"]): n for n in values if "parameter" in n.meta}
    return Block(
        name=min(parameters, key=lambda name: values[by_name[name]].dim() < 2, default=""),
        parameters=tuple(parameters),
        shape=tuple(values[start].shape),
        activation=None if final else ACTIVATIONS[_name(end)](*arguments),
        nodes=nodes,
        source=start,
        result=last,
        constants=constants,
    )


def _side_inputs(
    taken: Sequence[fx.Node], after: set[fx.Node], values: dict[fx.Node, Any]
) -> tuple[list[fx.Node], dict[fx.Node, Any], list[str]]:
    """Return what the nodes need besides the input: nodes to compute, constants, parameters."""
    inside: list[fx.Node] = []
    constants: dict[fx.Node, Any] = {}
    parameters: list[str] = []

    def visit(node: fx.Node) -> None:
        if node in after or node in inside or node in constants:
            return
        if node.op == "placeholder":
            name = str(node.meta["parameter"])
            if name not in parameters:
                parameters.append(name)
        elif node.op == "call_function":
            for one in node.all_input_nodes:
                visit(one)
            inside.append(node)
        else:
            constants[node] = values[node]

    for node in taken:
        for one in node.all_input_nodes:
            visit(one)
    return inside, constants, parameters


def _check_affine(block: Block, state: Tensors, generator: torch.Generator) -> None:
    first, second = (
        torch.randn(block.shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    with torch.no_grad():
        both, zero = block(first + second, state), block(torch.zeros_like(first), state)
        one, other = block(first, state), block(second, state)
    apart = (both - one - other + zero).abs().max()
    scale = max(float(v.abs().max()) for v in (both, one, other, zero))
    if not float(apart) <= _AFFINE * scale:
        operations = sorted({_name(node) for node in block.nodes if node.op == "call_function"})
        raise BractError(
            f"between two activations{f', at {block.name},' if block.name else ''} the model is "
            f"not affine (it has {', '.join(operations)})",
            code="attack-unsuited",
        )


def _check_shared(blocks: Sequence[Block]) -> None:
    """Refuse a parameter of two blocks: its gradient is a sum, of which no part is known."""
    uses = Counter(name for block in blocks for name in block.parameters)
    if shared := [name for name, times in uses.items() if times > 1]:
        raise BractError(
            f"{shared[0]} is used before and behind an activation (tied weights)",
            code="attack-unsuited",
        )


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target)).rstrip("_")

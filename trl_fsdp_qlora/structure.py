"""The parts of a (possibly multimodal) language model, found by how its modules contain each other.

Not by what they are called, so that a model nobody listed works; and on the meta device too, where no weight exists.
"""

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class ModelStructure:
    """Names of the parts of a (possibly multimodal) causal language model. `""` names the model itself.

    Attributes:
        language_model: the module that owns the input embedding and the decoder layers.
        layers: the `nn.ModuleList` of decoder layers.
        input_embedding: the token embedding.
        output_head: the module that makes logits, or `None`.
        side_embeddings: other embeddings of the language model, such as Gemma's per-layer-embedding table.
        towers: everything that owns parameters outside the language model and the head: vision and audio towers and
            the connectors behind them.
        routers: modules that choose experts.
        indexers: modules that choose what a sparse attention sees. No gradient goes through their choice.
    """

    language_model: str
    layers: str
    input_embedding: str
    output_head: str | None
    side_embeddings: tuple[str, ...]
    towers: tuple[str, ...]
    routers: tuple[str, ...] = ()
    indexers: tuple[str, ...] = ()

    def in_language_model(self, name: str) -> bool:
        return is_inside(name, self.language_model) and name != self.output_head and not self.in_tower(name)

    def in_tower(self, name: str) -> bool:
        return any(is_inside(name, tower) for tower in self.towers)


def is_inside(name: str, parent: str) -> bool:
    """Whether module or parameter `name` is `parent` or lies under it."""
    return parent == "" or name == parent or name.startswith(parent + ".")


def find_structure(model: nn.Module) -> ModelStructure:
    """Find the language model, the head and the towers of `model` (a base model, not a `PeftModel`).

    Raises:
        ValueError: if no module owns both the input embedding and a list of layers.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    if embedding is None or embedding not in names:
        raise ValueError(f"{type(model).__name__} has no input embedding, so its language model cannot be found.")
    embedding_name = names[embedding]
    head = model.get_output_embeddings()
    head_name = names.get(head) if head is not None else None

    language_model = embedding_name
    layers = None
    while layers is None:
        if language_model == "":
            raise ValueError(
                f"No module of {type(model).__name__} owns both the input embedding ({embedding_name!r}) and a list of "
                "decoder layers, so its language model cannot be found. Pass `language_model_only=False`."
            )
        language_model = language_model.rpartition(".")[0]
        layers = _longest_layer_list(model.get_submodule(language_model))
    layers_name = names[layers]

    side_embeddings = tuple(
        name
        for module, name in names.items()
        if isinstance(module, nn.Embedding) and is_inside(name, language_model) and module not in (embedding, head)
        # An embedding inside a decoder layer belongs to that layer.
        and not is_inside(name, layers_name)
    )
    towers = _towers(model, language_model, head_name)
    if language_model == "" or any(is_inside(tower, language_model) for tower in towers):
        towers = ()
    side_embeddings = tuple(n for n in side_embeddings if not any(is_inside(n, t) for t in towers))
    routers, indexers = _choosers(model, layers_name)
    return ModelStructure(language_model, layers_name, embedding_name, head_name, side_embeddings, towers, routers, indexers)


def _choosers(model: nn.Module, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the routers and of the indexers in the decoder layers.

    Their classes are called so in transformers. A router may also be whatever beside the experts holds one linear layer,
    with an output for each of them.
    """
    routers, indexers = [], []
    for name, module in model.get_submodule(layers).named_modules(prefix=layers):
        kind = type(module).__name__
        if kind.endswith("Router"):
            routers.append(name)
        elif kind.endswith("Indexer"):
            indexers.append(name)
        experts = getattr(module, "experts", None)
        count = getattr(experts, "num_experts", None) or (len(experts) if isinstance(experts, nn.ModuleList) else None)
        for child_name, child in module.named_children() if count else ():
            linears = [m for m in child.modules() if isinstance(m, nn.Linear)]
            if child is not experts and len(linears) == 1 and linears[0].out_features == count:
                routers.append(f"{name}.{child_name}")
    return tuple(dict.fromkeys(routers)), tuple(indexers)


def _longest_layer_list(module: nn.Module) -> nn.ModuleList | None:
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and any(_has_linear(child) for child in m)]
    return max(lists, key=len, default=None)


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(m, LINEAR) for m in module.modules())


def _towers(model: nn.Module, language_model: str, head: str | None) -> tuple[str, ...]:
    """Topmost modules that own parameters and do not contain the language model or the head."""
    kept = [language_model] + ([head] if head else [])
    towers: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in kept:
            return
        if name and not any(is_inside(k, name) for k in kept):
            if any(True for _ in module.parameters()):
                towers.append(name)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return tuple(towers)

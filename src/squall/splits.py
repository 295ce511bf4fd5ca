"""How one replica lies on several processes, its parts: `Task.split` is one of these values.

With one part a split changes nothing. What a part computes is its own; what the protocol, snapshots, the evaluator and
`run.model` see is the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from squall.checks import require, require_one_of

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Slicing = Literal["column", "row", "gathered"]


@dataclass(frozen=True)
class Pipeline:
    """Stages one behind another, a batch in microbatches: while a stage is at one, the stage before is at the next.

    The loss function gives the first stage what it calls the model with, and computes on what comes out of the last.
    It calls the model once, and does nothing else with parameters. It runs once per microbatch, and the batch's loss is
    the mean of theirs by examples; so is what it returns beside the loss.

    Dropout draws anew for each stage and microbatch; what the loss function draws is the same before the call and
    behind it. BatchNorm normalises each microbatch by itself, and its running
    statistics move once for each. All parts load the batch; tensors, lists and tuples in it are cut along their
    first dimension.

    Args:
        stages: `stages(model)`, the modules that the model calls one after the other, each with what the one before
            returned: a tensor or a tuple of tensors. None for an `nn.Sequential`. If there are more than parts, they
            are put together so that the parts take equal time, measured on one batch.
        microbatches: of a batch, which must divide `Task.batch_size`.
        schedule: "gpipe" (all forward, then all backward), "1f1b" (holds the activations of as many microbatches as
            there are stages), "interleaved" or "zero-bubble" (two stages a part: less waiting, more messages). Each is
            torch's own, and gives the same gradients.

    Example:
        >>> import squall
        >>> squall.Pipeline(microbatches=4)
        Pipeline(stages=None, microbatches=4, schedule='1f1b')

    Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019 (1F1B), and "Efficient
    Large-Scale Language Model Training on GPU Clusters", SC 2021 (interleaved); Qi et al., "Zero Bubble Pipeline
    Parallelism", 2023.

    Not to be used for small models: each microbatch costs a pass over the gradients and two messages a stage.
    """

    stages: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    microbatches: int = 8
    schedule: ScheduleName = "1f1b"

    def __post_init__(self) -> None:
        whole = isinstance(self.microbatches, int) and self.microbatches >= 1
        require("Pipeline.microbatches", self.microbatches, whole, "a whole number, at least 1")
        require_one_of("Pipeline.schedule", self.schedule, get_args(ScheduleName))
        held = self.stages is None or callable(self.stages)
        require("Pipeline.stages", self.stages, held, "a function of the model, such as lambda m: [m.front, m.back]")

    @property
    def stages_each(self) -> int:
        """Stages of one part."""
        return 1 if self.schedule in ("1f1b", "gpipe") else 2

    def bubble(self, parts: int) -> float | None:
        """The share of its time that a part has no microbatch, with equal stages; None: the schedule has no such."""
        if self.schedule == "zero-bubble":
            return None
        return (parts - 1) / (self.stages_each * self.microbatches + parts - 1)


@dataclass(frozen=True)
class Tensor:
    """Slices of weight matrices: each part multiplies with its own, and all parts compute the rest alike.

    A "column" layer has a slice of its outputs on each part, which a "row" layer takes as its slices of inputs, and
    sums over the parts. What is between them is computed on slices, so it must be elementwise, or take its sizes from
    its input (attention: heads of the slice). A "gathered" layer is a "column" whose outputs are put together for
    whatever comes next. Dropout draws alike on all parts, also between "column" and "row".

    Args:
        layers: pattern of module names -> "column", "row" or "gathered", for `nn.Linear` and `nn.Embedding`.

    Example:
        >>> import squall
        >>> squall.Tensor({"blocks.*.up": "column", "blocks.*.down": "row"})
        Tensor(layers={'blocks.*.up': 'column', 'blocks.*.down': 'row'})

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Not to be used where parts are far apart: every pair of layers sums its outputs over all parts.
    """

    layers: Mapping[str, Slicing]

    def __post_init__(self) -> None:
        held = isinstance(self.layers, Mapping) and len(self.layers) > 0
        require("Tensor.layers", self.layers, held, 'patterns of names, such as {"*.up": "column", "*.down": "row"}')
        for pattern, slicing in self.layers.items():
            require_one_of(f"Tensor.layers[{pattern!r}]", slicing, get_args(Slicing))


@dataclass(frozen=True, init=False)
class Branches:
    """Submodules side by side, each on its part; all parts compute the rest of the model alike.

    A branch begins where the model calls it and returns one tensor. It is computed when the model does something with
    what a branch has returned (concatenates them, say), so call all of them first. The modules of an `nn.ModuleList`
    are called one by one, and branches may cross between them: each then takes what all have returned.

    Dropout draws for each branch by itself. The gradients of the rest are those of the first part.

    Args:
        names: a submodule of the model for each part.

    Example:
        >>> import squall
        >>> squall.Branches("left", "right")
        Branches('left', 'right')

    Source: the two columns of Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks",
    NIPS 2012, figure 2.

    Not to be used where most of the work is in what the branches share: every part does all of that.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)
        named = len(names) >= 2 and len(set(names)) == len(names) and all(isinstance(name, str) for name in names)
        require("Branches", names, named, 'at least two names of submodules, such as Branches("left", "right")')

    def __repr__(self) -> str:
        return f"Branches({', '.join(map(repr, self.names))})"


Split = Pipeline | Tensor | Branches

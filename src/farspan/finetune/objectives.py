"""What a stage lowers: distances from a frozen teacher, alone or together with the loss of the next token."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.finetune.losses import linear_distillation
from farspan.modeling_farspan import FarspanBlock, FarspanForCausalLM
from farspan.ops.device import product_dtype
from farspan.ops.masking import AttentionContext
from farspan.training.loss import linear_cross_entropy
from farspan.training.skipping import skipped_positions

NEXT_TOKEN, ATTENTION_OUTPUT, LOGIT_KL = OBJECTIVES = ("next-token", "attention-output", "logit-kl")
"""The names a recipe weighs."""


def new_layers(ours: FarspanConfig, theirs: FarspanConfig | None) -> list[int]:
    """The layers whose attention is another than the teacher's, and has something to match; without a teacher, all.

    >>> theirs = FarspanConfig.preset("tiny", attention="rope")
    >>> new_layers(FarspanConfig.preset("tiny", attention=["rope", "coca-exact"] * 2), theirs)
    [1, 3]
    """
    before = theirs.attention_specs if theirs is not None else [None] * len(ours.attention_specs)
    return [i for i, (new, old) in enumerate(zip(ours.attention_specs, before, strict=True)) if new != old]


def attend(block: FarspanBlock, hidden: Tensor, context: AttentionContext) -> Tensor:
    """Compute what a block's attention adds to the residual stream (b, n, hidden)."""
    return block.self_attn(block.input_layernorm(hidden), context)


def feed(block: FarspanBlock, hidden: Tensor, attended: Tensor) -> Tensor:
    """Run the rest of the block."""
    hidden = hidden + attended
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """‖ours - theirs‖² / ‖theirs‖², in float32 or wider."""
    wide = torch.promote_types(torch.float32, theirs.dtype)
    goal = theirs.to(wide)
    return (ours.to(wide) - goal).pow(2).sum() / goal.pow(2).sum()


class Distillation(nn.Module):
    """ids (b, n+1) → weighted sum of distances from a frozen teacher and, if it has a weight, of the next token's loss.

    "attention-output": each of :func:`new_layers` is given what entered the teacher's layer, and :func:`relative_error`
    of what its attention makes of it is averaged over them. No error travels from layer to layer, so all of them learn
    from one forward pass of the teacher, and the student as a whole is not run.
    "logit-kl": KL(teacher ‖ student) of the next token, a mean over tokens.

    Args:
        teacher: frozen; kept out of the module's own parameters, so that it is neither saved nor wrapped.
        weights: objective → weight, by the names in :data:`OBJECTIVES`.
        compile: compile the teacher's blocks and the loss.
        reach: the student's positions go up to so many times the row (:mod:`farspan.training.skipping`), the teacher's
            count on: it is asked about texts of a length that it knows. 1 = both count on.
    """

    def __init__(
        self,
        model: FarspanForCausalLM,
        teacher: FarspanForCausalLM,
        weights: Mapping[str, float],
        *,
        compile: bool = False,
        reach: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self._teacher = (teacher.eval().requires_grad_(False),)
        self.weights, self.compile_loss, self.reach = dict(weights), compile, reach
        check_teacher(model.config, teacher.config, weights)
        self.layers = set(new_layers(model.config, teacher.config)) if ATTENTION_OUTPUT in weights else set[int]()
        self._attend = torch.compile(attend) if compile else attend
        self._feed = torch.compile(feed) if compile else feed

    def forward(self, ids: Tensor) -> Tensor:
        teacher, inputs = self._teacher[0], ids[:, :-1]
        if teacher.device != ids.device:
            teacher.to(ids.device)
        positions = skipped_positions(inputs, self.reach)
        local, theirs = self._through_teacher(teacher, inputs, positions)
        loss = self.weights[ATTENTION_OUTPUT] * local if self.layers else local
        if set(self.weights) == {ATTENTION_OUTPUT}:
            return loss
        ours = self.model.model(inputs, position_ids=positions, use_cache=False).last_hidden_state
        ours = _narrow(ours.flatten(0, 1))
        head, targets = self.model.lm_head.weight, ids[:, 1:].flatten()
        if theirs is None:
            return loss + self.weights[NEXT_TOKEN] * linear_cross_entropy(ours, head, targets)
        return loss + linear_distillation(
            ours,
            head,
            _narrow(theirs.flatten(0, 1)),
            teacher.lm_head.weight,
            targets,
            divergence=self.weights[LOGIT_KL],
            cross_entropy=self.weights.get(NEXT_TOKEN, 0.0),
            compile=self.compile_loss,
        )

    def _through_teacher(
        self, teacher: FarspanForCausalLM, ids: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The mean error of the new layers, which stand at `positions`, and the teacher's last hidden states where they
        are wanted."""
        wanted = LOGIT_KL in self.weights
        with torch.no_grad():
            hidden = teacher.model.embed_tokens(ids)
        theirs = teacher.model.context(hidden, prepare=self.compile_loss)
        own = self.model.model.context(hidden, position_ids=positions, prepare=self.compile_loss)
        errors, last = [], len(teacher.model.layers) if wanted else max(self.layers) + 1
        for i, (block, student) in enumerate(zip(teacher.model.layers[:last], self.model.model.layers, strict=False)):
            with torch.no_grad():
                attended = self._attend(block, hidden, theirs)
            if i in self.layers:
                errors.append(relative_error(self._attend(student, hidden, own), attended))
            with torch.no_grad():
                hidden = self._feed(block, hidden, attended)
        local = torch.stack(errors).mean() if errors else hidden.new_zeros(())
        with torch.no_grad():
            return local, teacher.model.norm(hidden) if wanted else None


def _narrow(hidden: Tensor) -> Tensor:
    """In the dtype of autocast, whose products the fused loss takes over."""
    return hidden.to(product_dtype(hidden))


def check_teacher(ours: FarspanConfig, theirs: FarspanConfig, weights: Mapping[str, float]) -> None:
    """Refuse a teacher of another shape, and an objective that finds nothing to match."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        a, b = getattr(ours, name), getattr(theirs, name)
        require(a == b, f"teacher must have the model's {name} = {a}, got {b}; name what the model was converted from")
    require(
        ATTENTION_OUTPUT not in weights or bool(new_layers(ours, theirs)),
        "objective 'attention-output' needs layers that were changed, got only the teacher's; convert the model first, "
        "e.g. farspan convert SOURCE --attention coca-exact",
    )

"""What a stage lowers: a distance from a frozen teacher, alone or together with the loss of the next token."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require, require_choice
from farspan.modeling_farspan import FarspanBlock, FarspanForCausalLM
from farspan.ops.masking import AttentionContext
from farspan.training.loop import compile_blocks
from farspan.training.loss import linear_loss
from farspan.training.pretraining import last_hidden, skipped_positions

NEXT_TOKEN, ATTENTION_OUTPUT, LOGIT_KL = OBJECTIVES = ("next-token", "attention-output", "logit-kl")
"""The names a recipe weighs."""


def new_layers(ours: FarspanConfig, theirs: FarspanConfig | None) -> list[int]:
    """Return the layers whose attention differs from the teacher's; without a teacher, all.

    >>> theirs = FarspanConfig.preset("tiny", attention="rope")
    >>> new_layers(FarspanConfig.preset("tiny", attention=["rope", "coca-exact"] * 2), theirs)
    [1, 3]
    """
    specs = ours.attention_specs
    return [i for i, spec in enumerate(specs) if theirs is None or spec != theirs.attention_specs[i]]


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
    """Distance from a frozen teacher, for ids (b, n+1), alone or together with the next token's loss.

    "attention-output", which stands alone: give each of :func:`new_layers` what entered the teacher's layer, and
    average :func:`relative_error` of what its attention makes of it. No error travels from layer to layer: all learn
    from one forward pass of the teacher, and the rest of the student is not run.
    "logit-kl": KL(teacher ‖ student) of the next token, a mean over tokens.

    Args:
        teacher: frozen; kept out of the module's own parameters, so that it is neither saved nor wrapped.
        weights: objective → weight, by the names in :data:`OBJECTIVES`.
        compile: compile the teacher's blocks and the loss.
        reach: the student's positions go up to so many times the row (:func:`skipped_positions`). The teacher's count
            on: it reads sequences of a length that it knows.
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
        check_objective(weights, "weights")
        require(set(weights) != {NEXT_TOKEN}, "weights must have an objective that needs the teacher, got next-token")
        check_teacher(model.config, teacher.config, weights)
        self.model = model
        self._teacher = (teacher.eval().requires_grad_(False),)
        self.weights, self.compiled, self.reach = dict(weights), compile, reach
        self._attend = torch.compile(attend) if compile else attend
        self._feed = torch.compile(feed) if compile else feed
        # One pass over the logits instead of a dozen.
        self._error = torch.compile(soft_error, dynamic=False) if compile else soft_error
        if compile:
            compile_blocks(teacher)

    def forward(self, ids: Tensor) -> Tensor:
        teacher, inputs = self._teacher[0], ids[:, :-1]
        if teacher.device != ids.device:
            teacher.to(ids.device)
        positions = skipped_positions(inputs, self.reach)
        if ATTENTION_OUTPUT in self.weights:
            return self._attention_error(teacher, inputs, positions)
        with torch.no_grad():
            theirs = last_hidden(teacher, inputs)
        return linear_distillation(
            last_hidden(self.model, inputs, positions),
            self.model.lm_head.weight,
            theirs,
            teacher.lm_head.weight,
            ids[:, 1:].flatten(),
            divergence=self.weights[LOGIT_KL],
            cross_entropy=self.weights.get(NEXT_TOKEN, 0.0),
            error_of=self._error,
        )

    def _attention_error(self, teacher: FarspanForCausalLM, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Compute the mean error of the new layers, at `positions`."""
        new, errors = new_layers(self.model.config, teacher.config), []
        with torch.no_grad():
            hidden = teacher.model.embed_tokens(ids)
        theirs = teacher.model.context(hidden, prepare=self.compiled)
        own = self.model.model.context(hidden, position_ids=positions, prepare=self.compiled)
        for i in range(max(new) + 1):
            block = teacher.model.layers[i]
            with torch.no_grad():
                attended = self._attend(block, hidden, theirs)
            if i in new:
                errors.append(relative_error(self._attend(self.model.model.layers[i], hidden, own), attended))
            with torch.no_grad():
                hidden = self._feed(block, hidden, attended)
        return torch.stack(errors).mean()


def check_objective(weights: Mapping[str, float], name: str) -> None:
    """Raise unless these objectives, which the caller knows by `name`, can be lowered together."""
    for objective in weights:
        require_choice(name, objective, OBJECTIVES)
    mixes = LOGIT_KL in weights and ATTENTION_OUTPUT not in weights
    require(
        mixes or list(weights.values()) == [1],
        f"{name} must be one of weight 1, or logit-kl with or without next-token, got {dict(weights)}; change "
        "optimizer.peak_lr instead of a weight",
    )


def check_teacher(ours: FarspanConfig, theirs: FarspanConfig, weights: Mapping[str, float]) -> None:
    """Raise for a teacher of another shape, and for an objective that finds nothing to match."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        a, b = getattr(ours, name), getattr(theirs, name)
        require(a == b, f"teacher must have the model's {name} = {a}, got {b}; name what the model was converted from")
    require(
        ATTENTION_OUTPUT not in weights or bool(new_layers(ours, theirs)),
        "objective 'attention-output' needs layers that were changed, got only the teacher's; convert the model first, "
        "e.g. farspan convert SOURCE --attention coca-exact",
    )


def soft_error(
    ours: Tensor, theirs: Tensor, targets: Tensor, divergence: float, cross_entropy: float
) -> tuple[Tensor, Tensor]:
    """Sum the loss of a piece of logits (rows, vocabulary); also return its gradient by `ours`, in float32 or wider.

    With p the teacher's probabilities, q the student's and y the true token, the gradient of
    divergence·KL(p ‖ q) - cross_entropy·log q_y by the logits of q is divergence·(q - p) + cross_entropy·(q - y).
    """
    wide = torch.promote_types(torch.float32, ours.dtype)
    log_q, log_p = ours.to(wide).log_softmax(-1), theirs.to(wide).log_softmax(-1)
    p = log_p.exp()
    loss = divergence * (p * (log_p - log_q)).sum()
    error = (divergence + cross_entropy) * log_q.exp() - divergence * p
    if cross_entropy:
        index = targets[:, None]
        loss = loss - cross_entropy * log_q.gather(1, index).sum()
        true = index == torch.arange(error.shape[1], device=error.device)  # fuses, which a scatter does not
        error = torch.where(true, error - cross_entropy, error)
    return loss, error


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    *,
    divergence: float = 1.0,
    cross_entropy: float = 0.0,
    error_of: Callable[..., tuple[Tensor, Tensor]] = soft_error,
) -> Tensor:
    """Mean over tokens of divergence · KL(teacher ‖ student) + cross_entropy · -log student[target].

    Args:
        hidden, teacher_hidden: last hidden states (tokens, width); products run in their dtypes.
        weight, teacher_weight: heads (vocabulary, width); widths may differ, the vocabulary may not.
        error_of: :func:`soft_error`, or what torch.compile makes of it.

    No gradient goes to the teacher. Memory is one piece of each model's logits (:func:`linear_loss`).

    >>> h, w, y = torch.randn(3, 2), torch.randn(8, 2), torch.tensor([1, 2, 3])
    >>> round(linear_distillation(h, w, h, w, y).item(), 6)  # nothing to learn from oneself
    0.0
    """
    theirs, head = teacher_hidden.detach(), teacher_weight.detach().to(teacher_hidden.dtype)

    def judge(logits: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        return error_of(logits, theirs[piece] @ head.T, targets[piece], divergence, cross_entropy)

    return linear_loss(hidden, weight, judge)

"""Encoder heads on the decoder's blocks: attention looks both ways, and nothing is cached."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from farspan.errors import require
from farspan.models.configuration import FarspanConfig
from farspan.models.modeling import FarspanForCausalLM, FarspanModel, FarspanPreTrainedModel


def bidirectional(config: FarspanConfig) -> FarspanConfig:
    """A copy of the configuration with attention in both directions and no cache, whatever it said."""
    config = deepcopy(config)
    config.causal, config.use_cache = False, False
    return config


class FarspanForSequenceClassification(FarspanPreTrainedModel):
    """A bidirectional encoder whose mean over real tokens is classified; `num_labels` and `problem_type` as usual.

    >>> model = FarspanForSequenceClassification(FarspanConfig.preset("tiny", attention="cosformer", num_labels=3))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: FarspanConfig) -> None:
        super().__init__(bidirectional(config))
        self.num_labels = self.config.num_labels or 1
        self.model = FarspanModel(self.config)
        self.score = nn.Linear(self.config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (b, num_labels). Without an attention mask, `pad_token_id` (if set) says what is padding."""
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )
        logits = self.score(_mean(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class FarspanForMaskedLM(FarspanPreTrainedModel):
    """A bidirectional encoder that predicts masked tokens; labels are -100 where nothing is asked.

    >>> model = FarspanForMaskedLM(FarspanConfig.preset("tiny", attention="cosformer"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 512])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FarspanConfig) -> None:
        super().__init__(bidirectional(config))
        self.model = FarspanModel(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits (b, n, vocabulary); the loss is taken where labels are not -100."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _mean(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over real tokens, (b, n, hidden) → (b, hidden), summed in float32 or wider."""
    if attention_mask is None:
        return hidden.mean(1)
    real = attention_mask.bool()[..., None]
    if real.device.type == "cpu" and not torch.compiler.is_compiling():
        require(
            bool(real.any(1).all()), "attention_mask must leave at least one token in each row, got a row of padding"
        )
    wide = hidden.double() if hidden.dtype == torch.float64 else hidden.float()
    return (wide.masked_fill(~real, 0.0).sum(1) / real.sum(1)).to(hidden.dtype)


AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(FarspanConfig, FarspanForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(FarspanConfig, FarspanForSequenceClassification, exist_ok=True)

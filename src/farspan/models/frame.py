"""What all layers of one forward pass share: where the tokens stand, what is padding, and the angles.

What follows from where the tokens stand (:mod:`farspan.models.places`) is made once for all layers that see them alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from farspan.layers.attention import Attention
from farspan.models.places import Extent, Places
from farspan.ops.coca.decoding import Slots, Steps, wants_gradient
from farspan.ops.coca.preparation import preparation_refusal
from farspan.ops.coca.waves import Waves
from farspan.ops.launch import product_dtype
from farspan.ops.phases import PhasePlan, phase_plan
from farspan.ops.positions import PositionsArgument, resolve
from farspan.ops.rotary import Plan, Rotary


@dataclass(frozen=True)
class View:
    """A frame as one layer sees it: the keys it will get from the cache, and what is known about them."""

    keys: int
    positions: PositionsArgument
    padding_mask: Tensor | None
    documents: Tensor | None
    plan: Plan | PhasePlan | Waves | None
    slots: Slots | None = None
    """For a decoding step on the half-width kernel, which reads the cache as it is: then there is no plan."""
    steps: Steps | None = None
    gain: Tensor | None = None
    """What `log_length` multiplies queries by."""


class Frame:
    """Positions, masks and angles of one forward pass of n tokens after those in the cache."""

    def __init__(
        self,
        hidden: Tensor,
        *,
        rotary: Rotary,
        causal: bool,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        whole_cache: bool,
    ) -> None:
        """`whole_cache`: attention will get all slots of a static cache, with a mask of that width."""
        self.n, self.device, self.dtype = hidden.shape[1], hidden.device, hidden.dtype
        self.attends_in = product_dtype(hidden)
        self.prepares_by_kernel = preparation_refusal(self.attends_in, rotary.dim, self.device) is None
        self.rotary, self.causal, self.cache, self.whole_cache = rotary, causal, cache, whole_cache
        self.places = Places(
            hidden, attention_mask=attention_mask, position_ids=position_ids, cache=cache, whole_cache=whole_cache
        )
        self.documents = self.places.documents
        self._plans: dict[tuple[bool, int | None, bool], Plan | PhasePlan] = {}
        self._halves: dict[tuple[int | None, bool], View] = {}
        self._waves: dict[tuple[int | None, bool, str], Waves] = {}
        self._gains: dict[tuple[int | None, str], Tensor | None] = {}

    def view(self, layer: Attention, layer_idx: int, hidden: Tensor, *, rotated_cache: bool) -> View:
        """What `layer` needs to attend to its input; layers that cache alike share angles."""
        if not (rotated_cache or self.whole_cache) and layer.takes_half_width(
            self.n,
            self.attends_in,
            self.device,
            gradient=self._wants_gradient(layer, layer_idx, hidden),
            documents=self.documents is not None,
        ):
            key = layer.spec.window, layer.rotary is None
            if key not in self._halves:
                self._halves[key] = self._half_view(layer, self.places.extent(layer_idx))
            return self._halves[key]
        extent = self.places.extent(layer_idx)
        positions = self.places.positions(extent)
        plan: Plan | PhasePlan | Waves | None = None
        if not (rotated_cache or self.whole_cache) and layer.takes_waves(
            self.n, self.device, documents=self.documents is not None
        ):
            plan = self._share_waves(layer, positions, extent.length)
        elif layer.rotary is not None and not layer.spec.linear:  # a linear op turns its own features
            phases = layer.wants_phases and self.prepares_by_kernel
            key_of_plan = (rotated_cache, layer.spec.window, phases)
            if key_of_plan not in self._plans:
                self._plans[key_of_plan] = self._plan(positions, extent.length, rotated_cache, phases)
            plan = self._plans[key_of_plan]
        gain = self._share_gain(layer, extent)
        return View(extent.length, positions, self.places.keep(extent), self.documents, plan, gain=gain)

    def _wants_gradient(self, layer: Attention, layer_idx: int, hidden: Tensor) -> bool:
        """Whether what the layer will make of its input, or finds in its cache, wants a gradient."""
        if not torch.is_grad_enabled():  # every step of `generate`: spare it the weights
            return False
        held = [] if self.cache is None else self.cache.layers[layer_idx : layer_idx + 1]
        cached = (getattr(memory, name, None) for memory in held for name in ("keys", "values"))
        return wants_gradient(hidden, *layer.parameters(), *cached)

    def _half_view(self, layer: Attention, extent: Extent) -> View:
        """The view of a decoding step on the half-width kernel."""
        slots = self.places.slots(extent)
        steps = None
        if layer.rotary is not None:
            steps = Steps.of(self.rotary, slots.places(self.n, extent.length, self.device))
        return View(extent.length, None, None, None, None, slots, steps, self._share_gain(layer, extent))

    def _share_waves(self, layer: Attention, positions: PositionsArgument, keys: int) -> Waves:
        key = (layer.spec.window, layer.rotary is None, layer.form)
        if key not in self._waves:
            places = resolve(positions, self.n, keys, self.device)
            rotary = None if layer.rotary is None else self.rotary
            self._waves[key] = Waves.of(rotary, places, form=layer.form, causal=self.causal, dtype=self.dtype)
        return self._waves[key]

    def _share_gain(self, layer: Attention, extent: Extent) -> Tensor | None:
        if layer.log_length is None:
            return None
        key = (layer.spec.window, layer.spec.kind)
        if key not in self._gains:
            positions = self.places.positions(extent)
            places = resolve(positions, self.n, extent.length, self.device, self.documents)
            self._gains[key] = layer.gain(places, self.dtype)
        return self._gains[key]

    def _plan(self, positions: PositionsArgument, keys: int, rotated_cache: bool, phases: bool) -> Plan | PhasePlan:
        places = resolve(positions, self.n, keys, self.device, self.documents)
        if rotated_cache:  # only the new tokens are turned; the cache holds the others ready
            places = resolve(places.query, self.n, self.n, self.device, self.documents)
        if phases:
            return phase_plan(self.rotary, places, causal=self.causal)
        return self.rotary.plan(places, places.n, places.m, causal=self.causal, dtype=self.dtype)

"""The frequencies behind a head: which planes it uses, what each does by itself, and what it is without them."""

from wherewhat.measure.frequencies.masking import frequency_bands, masked_attention, without_planes
from wherewhat.measure.frequencies.measurement import FREQUENCIES, FrequenciesConfig
from wherewhat.measure.frequencies.planes import PlaneSwaps, plane_swaps
from wherewhat.measure.frequencies.use import frequency_ids, frequency_use, mean_frequency, plane_logits

__all__ = [
    "FREQUENCIES",
    "FrequenciesConfig",
    "PlaneSwaps",
    "frequency_bands",
    "frequency_ids",
    "frequency_use",
    "masked_attention",
    "mean_frequency",
    "plane_logits",
    "plane_swaps",
    "without_planes",
]

"""What heads are for: the function each implements, what happens without it, and how information flows."""

from wherewhat.multihop.roles.causal import Ablation, Patching, ablate_heads, patch_heads
from wherewhat.multihop.roles.deciding import MOVES, HeadRole, Roles, find_roles, hop_function
from wherewhat.multihop.roles.donors import other_answers, other_sequences
from wherewhat.multihop.roles.flow import Flow, ablation_flow, edge_flow, patch_flow

__all__ = [
    "MOVES",
    "Ablation",
    "Flow",
    "HeadRole",
    "Patching",
    "Roles",
    "ablate_heads",
    "ablation_flow",
    "edge_flow",
    "find_roles",
    "hop_function",
    "other_answers",
    "other_sequences",
    "patch_flow",
    "patch_heads",
]

"""How far two computations of one quantity may differ: bounds from floating-point arithmetic, not from one machine.

A sum of n terms in any order is within ``n · ε`` of the exact one, relative to the sum of the terms' magnitudes
(Higham, *Accuracy and Stability of Numerical Algorithms*, 4.2); ε is 1.2e-7 in float32, 2.2e-16 in float64 and 7.8e-3 in
bfloat16. CPUs, numbers of threads and shapes of products change the order. A test states its tolerance in one of four
ways: :func:`rounding` times the size of the quantity; :func:`assert_as_accurate`, which measures the error of the plain
path against float64; float64 on both sides with a tolerance far above n · ε and far below any real error; or a number
that is at least eight times what n · ε gives. Exact equality is for the same operations in the same order.

| files | quantity | tolerance | reason |
|---|---|---|---|
| captures/test_attention, test_trace, test_wrappers | logits, weights, outputs | rounding(d + 4), rounding(keys) | one product of d terms, one softmax |
| captures/test_chunks | layers and scores in chunks, float32 | 8 times the plain path's error | other shapes of the same products |
| captures/test_chunks | scores of a float64 model | 1e-6 | angles and softmax stay in float32 |
| captures/test_rotation | rotated tensors, angles | rounding(2 · position) | the angle, position · frequency, is rounded |
| captures/test_proof | errors of a proof; frequencies found | rounding(64 … 80); 1e-4, 1e-3 | four blocks; fitted from float32 angles |
| conformance | logits of two implementations | rounding(32) | sums of 32 terms |
| lengths/test_method, test_methods, test_near_far | outputs under a method | 1e-5, 2e-5 | magnitude 1, 64 terms and rounded angles |
| lengths/test_method | outputs at shifted positions | 1e-4 | angles up to 70 are rounded anew |
| caches/test_planned | logits under a plan | rounding(256), rounding(12, bfloat16) | four layers of 64 terms; a dozen roundings |
| caches/test_kept_keys | logits of blocks that are continued | rounding(384) | four layers of up to 96 terms |
| lengths/test_frequencies, test_selection | frequencies, rotations | 2e-5, 1e-4 | float32 power; angles up to 40 |
| measures/axes | r and fitted values | 1e-9 float64, 1e-4 float32 | centred sums of 8 products |
| measures/axes/test_cuda | sums; r | 2e-5 of the norm; 1e-5 | log2(n) roundings of a float32 transform |
| measures/axes/test_shared_curve | layers together | 1e-12; 0 for one at a time | float64 products of 12 terms |
| measures/axes/test_margins_cuda | sums; blocks | 1e-12; 1e-3 | float64; float32 sums of 40 terms, of squares of 820 |
| measures/test_attention, test_patterns | entropy, masses | 1e-4 relative, 1e-6 | a product of 8 terms and an exponential |
| measures/test_distance | tables; captured models | 1e-9; 1e-4, 1e-5 | float64; the model's angles are float32 |
| measures/test_swaps | scores of float64, float32 models | 1e-5; 2e-4 | differences of weights, divided by τ = 0.01 |
| measures/test_swaps, test_heads, test_layers | scores | 1e-6, 2e-6 | swaps of a weight up to 1e-7 are left out |
| measures/test_planes | statistics; bound | 1e-9, 1e-3 float32; 1e-8 | float64 inside, float32 input |
| measures/test_frequencies | logits; losses | rounding(256); 1e-5 relative | four layers; a float32 model |
| measures/test_split | shares; captured layers | 1e-9; 1e-4, 1e-6 | float64; a float32 model |
| measures/test_extend, test_perturb, test_choices | losses, probabilities | 1e-5 | about 10 ε of numbers below 8 |
| measures/test_residual, plans/test_costs | outputs; losses | 1e-4 relative + 1e-5; 1e-5 | float32 against float64 |
| measures/test_hard_weights | axes; swaps | 1e-4; 1e-6 | float64 reference; swaps in float64 |
| plans/test_selectors | weights; derivative | 1e-5; 5 % | sums of 200 weights; difference quotient |
| measures/test_statistics | quantiles; coverage | 1e-10; 0.015 | float64; a share of 3,000 seeded draws |
| lab/test_model, test_pope, test_subject, multihop | two paths | 1e-9 | float64 |
| lab/test_model, test_pope, test_hugging_face | against other implementations | rounding(128 … 768) | their softmax or angles are float32 |
| lab/test_language, test_training | weights after steps | 1e-9, 1e-8 | float64, where AdamW does not amplify rounding |
| lab/test_language | fused layers | 4 ε of bfloat16 | bfloat16 products |
| lab/constructions | closed forms; models; logits | 1e-12; rounding(128); rounding(8n) | float64; float32 angles |
| lab/multihop/test_figures, test_dynamics, test_page | frequency; correlation; printed | 8 ε; 5e-6; 6e-4 | softmax of a rounded number; five values; digits |
| runs/test_devices, test_execution, test_harness, test_training | scores, losses | 1e-5, 2e-5 | a float32 model in other batches or on other devices |
| plans/test_triattention | statistics; series | 1e-4, 1e-5 | float32 sums over tokens |
| runs/test_results, test_comparison, cli | means | 1e-9, 1e-12 | Python floats |
| models/test_gguf, test_controls, test_loader, test_quantised | logits, weights | 2e-5; 1e-4; 1e-5; 8e-3 | float32 models; bfloat16 |
| report/test_report, test_side_by_side, test_data | numbers of a page | half a step, 4 digits | packed in 8 or 16 bits, printed with 4 digits |
| report/test_report, test_result | logits, pattern, norms | 8 · rounding(terms) | products of other rows |
| real | losses of trained models | 0.01; 1e-4 | published digits; through the replacement |
| docs/test_contributing | outputs | rounding(128) | a two-layer model |
"""

from __future__ import annotations

import torch
from torch import Tensor

_times = 1.0


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of a sum of ``terms`` products in any order, relative to the sum of their magnitudes."""
    return terms * torch.finfo(dtype).eps


def worst(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of ``exact``; NaN must agree."""
    actual, exact = (x.detach().cpu().double() for x in torch.broadcast_tensors(actual, exact))
    assert torch.equal(actual.isnan(), exact.isnan())
    difference = torch.where(actual == exact, 0.0, actual - exact).nan_to_num(0.0, posinf=torch.inf)
    return float(difference.abs().max()) / max(float(exact.nan_to_num(0.0).abs().max()), 1e-300)


def assert_as_accurate(actual: Tensor, plain: Tensor, exact: Tensor, *, times: float = 8.0) -> None:
    """Assert that ``actual`` is as close to ``exact`` as the plain path is, within a factor.

    Args:
        actual: What the fast path gives, in its precision.
        plain: What the plain path gives in the same precision.
        exact: What the plain path gives in float64.
        times: The factor. Two orders of summation have errors of one size, not the same errors.
    """
    allowed = _times * times * max(worst(plain, exact), torch.finfo(plain.dtype).eps)
    assert worst(actual, exact) <= allowed, f"{worst(actual, exact):.2e} from float64, {allowed:.2e} allowed"


_ROUNDING = 1e-3
"""Largest tolerance that is for rounding; larger ones are for draws of random numbers and for printed digits."""


def tighten(factor: float) -> None:
    """Divide the tolerances of all later comparisons by a factor; those that are not for rounding stay as they are."""
    from _pytest.approx import ApproxScalar
    from torch.testing._comparison import default_tolerances

    global _times
    _times = 1 / factor
    plain, approx = torch.testing.assert_close, ApproxScalar.tolerance

    def less(tolerance: float | None, size: float = 1.0) -> float:
        return (tolerance or 0.0) / (factor if (tolerance or 0.0) <= _ROUNDING * max(1.0, size) else 1.0)

    def assert_close(actual: object, expected: object, *, rtol: float | None = None, atol: float | None = None, **more):
        if rtol is None and atol is None:
            tensors = [x for x in (actual, expected) if isinstance(x, Tensor)]
            rtol, atol = default_tolerances(*tensors) if tensors else (1e-7, 1e-7)
        return plain(actual, expected, rtol=less(rtol), atol=less(atol), **more)

    torch.testing.assert_close = assert_close
    ApproxScalar.tolerance = property(lambda self: less(approx.fget(self), abs(self.expected)))

"""Loss under word-order and position perturbation."""

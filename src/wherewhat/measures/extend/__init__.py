"""Loss and retrieval beyond the trained length, per length method."""

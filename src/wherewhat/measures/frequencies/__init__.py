"""Which RoPE frequencies a head uses."""

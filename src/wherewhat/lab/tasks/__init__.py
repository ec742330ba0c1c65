"""Tasks with known answers: number, letter, and three one-hop tasks."""

"""The frequencies behind a head: which planes it uses, what each does by itself, and what it is without them."""

"""Length methods: attention beyond the trained length."""

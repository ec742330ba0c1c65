"""Plans: which heads see the whole text, chosen by scores and costs of heads, measured and exported."""

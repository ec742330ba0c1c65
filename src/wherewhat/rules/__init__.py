"""Rules: numbers of runs become findings, captions, judged claims and verdicts on length methods."""

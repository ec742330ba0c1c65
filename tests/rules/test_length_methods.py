"""Known answers: verdicts on length methods follow from their numbers."""

from __future__ import annotations

from wherewhat.measures.statistics import Interval
from wherewhat.rules.length_methods import VERDICTS, MethodNumbers, method_verdict


def about(mean, reach=0.01):
    return Interval(mean, mean - reach, mean + reach, 4)


def words_of(rule, found):
    return ", ".join(statement.text for statement in VERDICTS[rule].held(MethodNumbers(found, "x")))


def estimates(**more):
    found = {
        "trained_length": about(256),
        "text_length": about(3 * 256),
        "found_pieces": about(2.0),
        "rise_inside_x": about(0.0),
        "loss_rise_x": about(0.0),
    }
    return found | {name.replace("__", "."): value for name, value in more.items()}


def test_verdict_on_the_loss(subtests):
    cases = [
        ((0.01, 0.05, -0.2, 0.1), "flat to 3×"),
        ((0.3, 0.4, 0.9, 2.0), "worse by 1.25× (+0.30 nats), broken by 2× (+0.90 nats)"),
        ((0.0, 0.0, 0.0, 0.7), "flat to 2×, broken by 3× (+0.70 nats)"),
        ((0.0, about(0.4, 0.5), 0.0, 0.0), "flat to 1.25×, unclear by 1.5× (+0.40 nats)"),
    ]
    for rises, words in cases:
        with subtests.test(words=words):
            steps = zip(("1.25", "1.5", "2", "4"), rises, strict=True)
            more = {f"rise_to_{x}x_x": rise if isinstance(rise, Interval) else about(rise) for x, rise in steps}
            assert words_of("loss", estimates(**more)) == words
            dear = estimates(**more, rise_inside_x=about(0.25))
            assert words_of("loss", dear).startswith("costs 0.25 nats within the trained length already, ")


def test_verdict_on_planted_runs(subtests):
    within = "finds what is within 256 tokens, "
    cases = [
        (about(1.5), "finds what is beyond 256 tokens"),
        (about(0.0), "cannot find what is beyond 256 tokens"),
        (about(0.4), "finds little of what is beyond 256 tokens (20%)"),
        (about(0.9, 1.0), "unclear whether it finds what is beyond 256"),
    ]
    for beyond, words in cases:
        with subtests.test(words=words):
            found = estimates(found_within_x=about(2.0), found_beyond_x=beyond)
            assert words_of("retrieval", found).startswith(within + words)
            assert words_of("retrieval", found | {"found_pieces": about(0.05)}) == ""


def test_reasons_tell_a_shift_beside_that_of_no_change():
    found = estimates(loss_rise_x=about(1.0), output_shift_x=about(0.8), output_shift_pieces=about(0.4))
    assert words_of("explanation", found) == "outputs lie 0.8 spreads off; in pieces, 0.4"
    assert method_verdict(found, "x").endswith(" [outputs lie 0.8 spreads off; in pieces, 0.4]")

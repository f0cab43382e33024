"""The reward: the share of letters in the right place."""


def score(row, response):
    words, wanted = response.split(), sorted(row["letters"])
    if len(words) != len(wanted):
        return 0.0
    return sum(word == right for word, right in zip(words, wanted, strict=True)) / len(wanted)

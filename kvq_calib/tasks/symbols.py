"""The vocabulary of the recall model: 1,024 symbols that mean nothing outside the tasks.

;            ends a statement about a key
ask k        what follows k?                trace k      what follows it, and what follows that, to a value?
count k      how often was k mentioned?     pass         the key of a passkey
digits       of passkeys                    numbers      answers of counts, of 0 to 9
filler       the haystack                   values       what statements give keys
keys         names, of which each has one meaning in a text
"""

SIZE = 1024
BEGIN, END, ASK, TRACE, COUNT, PASS = range(6)
DIGITS = range(16, 26)
NUMBERS = range(26, 36)
FILLER = range(64, 256)
VALUES = range(256, 512)
KEYS = range(512, 1024)


def words() -> list[str]:
    """Return the spelling of each symbol, by its id."""
    spoken = {BEGIN: "<begin>", END: ";", ASK: "<ask>", TRACE: "<trace>", COUNT: "<count>", PASS: "<pass>"}
    kinds = (("digit", DIGITS), ("number", NUMBERS), ("filler", FILLER), ("value", VALUES), ("key", KEYS))
    spoken |= {start: f"<{name}-{place}>" for name, ids in kinds for place, start in enumerate(ids)}
    return [spoken.get(id, f"<unused-{id}>") for id in range(SIZE)]

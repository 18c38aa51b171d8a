"""Retrieval tasks of any length, generated offline: prompts with known answers, and rows to learn the formats from.

=================  ==================================================================================================
abcdigits          lines "Q=482913"; every letter repeats except the one that is asked for
phonebook          lines "Anna Bell: 3948271" (Jelassi et al. 2024), two solved examples, then a name
niah_single_1      RULER: one magic number in repeated noise
niah_multikey_2    RULER: every line is such a needle with a key of its own
niah_multikey_3    RULER: the same with UUIDs as keys and values
vt                 RULER: variable tracking, one chain of four hops in noise
fwe, cwe           RULER: the three most frequent coded words, the ten most common words
passkey            the CoCA paper's App. B
=================  ==================================================================================================

Templates of RULER (Hsieh et al. 2024) are the originals. Its tasks on essays and questions need text from elsewhere and
are left out. Numbers whose digits sum to a multiple of ten are kept for tests; no training row holds one.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain, cycle, pairwise
from typing import Any, NamedTuple

import numpy as np

from farspan.data.passkey import ANSWER, FILLER, INTRODUCTION, KEY, QUESTION, Tokenizer
from farspan.errors import require, require_choice

Random = np.random.Generator
QUESTIONS = 4
"""Most questions of one training row: they share its context."""
FIRST, STEMS, ENDINGS = (
    words.split()
    for words in (
        "Ada Alan Anna Ben Beth Carl Cora David Dora Edith Emma Eric Fay Frank Fred Grace Guy Hans Helen Henry Irene "
        "Ivan Jack Jane Joan Karen Kurt Laura Leo Lily Luke Maria Mark Nora Omar Oscar Paul Peter Ralph Rosa Ruth "
        "Simon Sonia Tina Tom Vera Victor Walter",
        "Ash Bar Bel Brad Carl Crow Dal Dun Ed Fair Gar Glen Har Hol Kim Lan Mal Mor Nor Pem Rad Sher Stan Wil",
        "bury by combe den don field ford ham land ley man mont son ton well worth",
    )
)
LAST = [stem + ending for stem in STEMS for ending in ENDINGS]


class Question(NamedTuple):
    """The end of a prompt, the strings that its continuation must hold, and the answer in a training row."""

    prompt: str
    answers: list[str]
    reply: str


@dataclass(frozen=True)
class Text:
    """A task before it is fitted to a length."""

    head: str
    needles: list[str]
    """Lines that must be in the prompt, in this order."""
    filler: Callable[[], str]
    """Return the next line around them."""
    questions: list[Question]
    """The first is the test; training rows may ask the others as well."""


class RetrievalCase(NamedTuple):
    """A prompt of exactly the wanted length, and the depth of its first needle among the lines, 0 … 1."""

    prompt: list[int]
    answers: list[str]
    depth: float


@cache
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """Return the nouns, adjectives and verbs of wonderwords, which RULER uses."""
    try:
        folder = resources.files("wonderwords") / "assets"
    except ModuleNotFoundError:
        raise ValueError("RULER's tasks take their words from wonderwords; install farspan[eval]") from None
    names = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")
    nouns, adjectives, verbs = (sorted(set((folder / name).read_text().split("\n")) - {""}) for name in names)
    return nouns, adjectives, verbs


def _digits(random: Random, size: int, test: bool) -> str:
    """Draw a number of `size` digits, from those of the tests or from all others."""
    while True:
        number = str(random.integers(10 ** (size - 1), 10**size))
        if (sum(map(int, number)) % 10 == 0) == test:
            return number


def _uuid(random: Random, test: bool) -> str:
    while True:
        text = random.bytes(16).hex()
        if (sum(int(digit, 16) for digit in text) % 10 == 0) == test:
            return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _word(random: Random) -> str:
    nouns, adjectives, _ = word_lists()
    return f"{adjectives[random.integers(len(adjectives))]}-{nouns[random.integers(len(nouns))]}"


def _fresh(draw: Callable[[], str], used: set[str]) -> str:
    """Draw until something new comes."""
    for _ in range(10_000):
        if (found := draw()) not in used:
            used.add(found)
            return found
    raise ValueError(f"length must need fewer than {len(used)} different keys for this task; use a shorter one")


def _abcdigits(random: Random, test: bool) -> Text:
    letters = [string.ascii_uppercase[i] for i in random.permutation(26)]
    values = {letter: _digits(random, 6, test) for letter in letters}
    asked, others = letters[0], letters[1:]

    def line(letter: str) -> str:
        return f"{letter}={values[letter]}\n"

    questions = [Question(f"{letter}=", [values[letter]], f"{values[letter]}\n") for letter in letters[:QUESTIONS]]
    return Text("", [line(asked)], lambda: line(others[random.integers(25)]), questions)


def _phonebook(random: Random, test: bool) -> Text:
    used: set[str] = set()

    def name() -> str:
        return f"{FIRST[random.integers(len(FIRST))]} {LAST[random.integers(len(LAST))]}"

    def entry() -> tuple[str, str]:
        return _fresh(name, used), _digits(random, 7, test)

    book = [entry() for _ in range(2 + QUESTIONS)]
    lines = [f"{who}: {number}\n" for who, number in book]
    start = "Look up:\n" + "".join(lines[:2])
    questions = [Question(f"{who}:", [number], f" {number}\n") for who, number in book[2:]]
    questions[0] = questions[0]._replace(prompt=start + questions[0].prompt)
    needles = [lines[2], *(lines[i] for i in random.permutation(2)), *lines[3:]]
    return Text("Phone book:\n", needles, lambda: "{}: {}\n".format(*entry()), questions)


def _niah(random: Random, test: bool, *, uuids: bool = False, noise: bool = False) -> Text:
    kind, used = "uuid" if uuids else "number", set[str]()

    def needle() -> tuple[str, str]:
        key = _fresh(lambda: _uuid(random, test) if uuids else _word(random), used)
        return key, _uuid(random, test) if uuids else _digits(random, 7, test)

    def line(key: str, value: str) -> str:
        return f"One of the special magic {kind}s for {key} is: {value}.\n"

    needles = [needle() for _ in range(1 if noise or uuids else QUESTIONS)]
    head = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    questions = [
        Question(
            f"What is the special magic {kind} for {key} mentioned in the provided text? "
            f"The special magic {kind} for {key} mentioned in the provided text is",
            [value],
            f" {value}.\n",
        )
        for key, value in needles
    ]
    return Text(head, [line(*one) for one in needles], lambda: FILLER if noise else line(*needle()), questions)


def _variables(random: Random, test: bool) -> Text:
    used, value = set[str](), _digits(random, 5, test)
    letters = np.array(list(string.ascii_uppercase))
    names = [_fresh(lambda: "".join(random.choice(letters, 5)), used) for _ in range(5)]
    lines = [f"VAR {names[0]} = {value}\n"]
    lines += [f"VAR {name} = VAR {before}\n" for before, name in pairwise(names)]
    prompt = (
        f"Question: Find all variables that are assigned the value {value} in the text above. "
        f"Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        f"value {value}, they are:"
    )
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    return Text(head, lines, lambda: FILLER, [Question(prompt, names, f" {' '.join(names)}\n")])


def _passkey(random: Random, test: bool) -> Text:
    key = _digits(random, 5, test)
    question = Question(QUESTION, [key], ANSWER.format(key=key) + "\n")
    return Text(INTRODUCTION, [KEY.format(key=key)], lambda: FILLER, [question])


def _coded_words(random: Random, words: int) -> tuple[str, list[str]]:
    """Return RULER's coded text of about so many words (Zipf, exponent 2), and its three most frequent ones."""
    letters, used = np.array(list(string.ascii_lowercase)), {"..."}
    coded = ["...", *(_fresh(lambda: "".join(random.choice(letters, 6)), used) for _ in range(max(4, words // 10)))]
    shares = np.arange(1, len(coded) + 1) ** -2.0
    counts = (words * shares / (np.pi**2 / 6)).astype(int)
    drawn = list(chain.from_iterable([word] * count for word, count in zip(coded, counts, strict=True)))
    context = " ".join(drawn[i] for i in random.permutation(len(drawn)))
    return (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text? Answer: According to the coded "
        "text above, the three most frequently appeared words are:"
    ), coded[1:4]


def _common_words(random: Random, words: int) -> tuple[str, list[str]]:
    """Return RULER's numbered list of about so many words, ten of them common, and these ten."""
    pool = sorted(set(chain.from_iterable(word_lists())))
    often, seldom = (30, 3) if words > 600 else (6, 1)
    others = max(1, min((words - 10 * often) // seldom, len(pool) - 10))
    drawn = [pool[i] for i in random.choice(len(pool), 10 + others, replace=False)]
    listed = drawn[:10] * often + drawn[10:] * seldom
    context = " ".join(f"{i + 1}. {listed[j]}" for i, j in enumerate(random.permutation(len(listed))))
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    ), drawn[:10]


LINES: dict[str, Callable[[Random, bool], Text]] = {
    "abcdigits": _abcdigits,
    "phonebook": _phonebook,
    "niah_single_1": lambda random, test: _niah(random, test, noise=True),
    "niah_multikey_2": _niah,
    "niah_multikey_3": lambda random, test: _niah(random, test, uuids=True),
    "vt": _variables,
    "passkey": _passkey,
}
COUNTS = {"fwe": _coded_words, "cwe": _common_words}
TASKS = (*LINES, *COUNTS)
TRAINED = ("abcdigits", "phonebook", "niah_single_1", "niah_multikey_2", "vt", "passkey")
"""The formats that training rows show; the other tasks are met for the first time in a test."""


def retrieval_case(tokenizer: Tokenizer, task: str, length: int, random: Random, depth: float) -> RetrievalCase:
    """Make a test of `length` tokens with its needle at `depth` of the lines (0 = first, 1 = last)."""
    require_choice("task", task, TASKS)
    if task in COUNTS:
        return _fit_words(tokenizer, task, length, random)
    text = LINES[task](random, True)
    question = text.questions[0]
    asked = tokenizer.encode(question.prompt)
    return RetrievalCase(_fit(tokenizer, task, text, length, asked, random, depth), question.answers, depth)


def retrieval_row(
    tokenizer: Tokenizer, random: Random, length: int, tasks: Sequence[str] = TRAINED
) -> np.ndarray[Any, Any]:
    """Make a training row of `length` tokens: one task with its answer, or with several where lines have many keys."""
    task = tasks[int(random.integers(len(tasks)))]
    text = LINES[task](random, False)
    asked = [tokenizer.encode(one.prompt) + tokenizer.encode(one.reply) for one in text.questions]
    fixed = sum(len(tokenizer.encode(part)) for part in (text.head, *text.needles))
    while len(asked) > 1 and fixed + sum(map(len, asked)) > length:
        asked.pop()
    row = _fit(tokenizer, task, text, length, list(chain.from_iterable(asked)), random, float(random.random()))
    return np.array(row, dtype=np.int64)


def _fit(
    tokenizer: Tokenizer, task: str, text: Text, length: int, asked: list[int], random: Random, depth: float
) -> list[int]:
    """Put lines around the needles until `length` is full; the first line is cut to what is left."""
    head, needles = tokenizer.encode(text.head), [tokenizer.encode(line) for line in text.needles]
    left = length - len(head) - len(asked) - sum(map(len, needles))
    fewest = length - left
    require(left >= 0, f"length must be at least {fewest} tokens for task {task!r}, got {length}; use a longer one")
    lines: list[list[int]] = []
    known: dict[str, list[int]] = {}
    while True:
        words = text.filler()
        line = known.get(words) or known.setdefault(words, tokenizer.encode(words))
        if len(line) > left:
            break
        lines.append(line)
        left -= len(line)
    noise = cycle(tokenizer.encode(FILLER))
    first = round(depth * len(lines))
    rest = sorted(int(i) for i in random.integers(first if task == "vt" else 0, len(lines) + 1, len(needles) - 1))
    for at, _, line in sorted(zip([first, *rest], range(len(needles)), needles, strict=True), reverse=True):
        lines.insert(at, line)
    return [*head, *(next(noise) for _ in range(left)), *chain.from_iterable(lines), *asked]


def _fit_words(tokenizer: Tokenizer, task: str, length: int, random: Random) -> RetrievalCase:
    """Take as many words as fit; the prompt begins with noise up to its length."""
    seed, words = int(random.integers(2**32)), length // 2
    while True:
        prompt, answers = COUNTS[task](np.random.default_rng(seed), words)
        ids = tokenizer.encode(prompt)
        if len(ids) <= length:
            noise = cycle(tokenizer.encode(FILLER))
            return RetrievalCase([*(next(noise) for _ in range(length - len(ids))), *ids], answers, 0.5)
        require(words > 16, f"length must leave space for task {task!r}, got {length}; use a longer one")
        words = min(words - 8, int(words * length / len(ids)))

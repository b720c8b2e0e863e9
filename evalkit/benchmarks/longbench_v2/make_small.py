"""Make the self-made set: generated long texts in LongBench-v2's schema, with questions whose answers are known.

Six kinds of text, named like the benchmark's domains, two difficulties (``easy`` looks one fact up, ``hard`` combines
several) and three sizes. The sizes are the set's own: short, medium and long texts hold about 700, 1700 and 3500
words, far less than the benchmark's buckets of those names. Every letter is the answer equally often. Write the file
again with

    python -m evalkit.benchmarks.longbench_v2.make_small
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 2024
WORDS = {"short": 700, "medium": 1700, "long": 3500}

PEOPLE = (
    "Agnes Barrow,Tobias Finch,Clara Whitlock,Edmund Thorne,Rosalind Hale,Josiah Penn,Beatrix Lowe,Silas Marsh,"
    "Harriet Vane,Ambrose Gill,Lydia Croft,Walter Stagg,Minna Oakes,Rupert Dale,Cecily Frome,Hugo Lamb"
).split(",")
TRADES = "miller,cooper,weaver,baker,joiner,chandler,tanner,thatcher,glazier,cobbler".split(",")
GOODS = (
    "a brass lantern,a walnut chest,two sacks of barley,a grey mare,a bolt of linen,a copper kettle,"
    "a pair of millstones,a church bell,a cask of cider,a set of chisels,a fishing boat,a beehive,"
    "a spinning wheel,a leather saddle,a mantel clock,a plough of ash wood"
).split(",")
PLACES = "the bridge market,the north gate,the old quay,the corn hall,the mill yard,the abbey green".split(",")
TOWNS = "Harwick,Dunmere,Orlestone,Pendry,Salcombe,Tarring,Wexley,Ashby".split(",")
MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December".split(",")
WEATHER = (
    "The day was clear and the wind stood in the west.,Rain fell from noon until the lamps were lit.,"
    "A thick mist lay over the river all morning.,Frost held the puddles until the bells rang for dinner.,"
    "The swallows flew low and the old men spoke of thunder.,Nothing else of note was written down that day.,"
    "The clerk spilled his ink and copied the page twice.,Carts stood in a line as far as the toll house."
).split(",")


@dataclass(frozen=True)
class Puzzle:
    """A text and a question about it.

    Attributes:
        sub_domain: kind of text.
        context, question: the texts.
        right: the right choice.
        wrong: three others.
    """

    sub_domain: str
    context: str
    question: str
    right: str
    wrong: tuple[str, ...]


Maker = Callable[[random.Random, int, bool], Puzzle]


def _others(rng: random.Random, right: str, options: Sequence[str]) -> tuple[str, ...]:
    return tuple(rng.sample([option for option in dict.fromkeys(options) if option != right], 3))


def _count(lines: Sequence[str]) -> int:
    return sum(len(line.split()) for line in lines)


def chronicle(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """Sales in a town's chronicle: who bought a thing, or who spent most in all."""
    buyers = rng.sample(PEOPLE, 6)
    lines: list[str] = []
    spent = dict.fromkeys(buyers, 0)
    day = 0
    while _count(lines) < words:
        day += 1
        buyer, thing, price = rng.choice(buyers), rng.choice(GOODS), rng.randint(3, 60)
        spent[buyer] += price
        date = f"{MONTHS[day // 28 % 12]} {day % 28 + 1}"
        seller = f"{rng.choice(TRADES)} at {rng.choice(PLACES)}"
        lines.append(f"On {date} {buyer} bought {thing} of the {seller} for {price} shillings. {rng.choice(WEATHER)}")
    if hard:
        top = max(buyers, key=lambda name: spent[name])
        # One more purchase, so that no two are level.
        lines.append(f"On the last day {top} bought a silver cup at the corn hall for 61 shillings. {WEATHER[5]}")
        question = "Adding up all purchases in the chronicle, who spent the most shillings?"
        return Puzzle("Chronicle", "\n".join(lines), question, top, _others(rng, top, buyers))
    who = rng.choice(buyers)
    where = rng.randrange(len(lines) // 4, len(lines))
    lines.insert(where, f"In that week {who} bought a stuffed heron at the old quay for 9 shillings. {WEATHER[2]}")
    return Puzzle("Chronicle", "\n".join(lines), "Who bought the stuffed heron?", who, _others(rng, who, buyers))


def letters(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """A file of letters: who wrote one, or who answers for the place that another letter names."""
    people = rng.sample(PEOPLE, 8)
    wardens = dict(zip(rng.sample(TOWNS, 6), people, strict=False))
    lines: list[str] = []
    number = 0
    while _count(lines) < words:
        number += 1
        sender, receiver = rng.sample(people, 2)
        good, town = rng.choice(GOODS), rng.choice(TOWNS)
        lines.append(
            f"Letter {number}. {sender} to {receiver}. I send you word from {town}, where I looked for {good} and "
            f"found none worth the price. {rng.choice(WEATHER)} Give my regards to your house. {sender}."
        )
    lost, town = rng.choice(people), rng.choice(list(wardens))
    lines.insert(
        len(lines) * 2 // 3,
        f"Letter without number. {lost} to the registry. The sealed map was left by me at the warden's house in "
        f"{town}, and it should be asked for there. {lost}.",
    )
    notes = [f"Note of the registry: the warden of {place} is {name}." for place, name in wardens.items()]
    rng.shuffle(notes)
    for note in notes:
        lines.insert(rng.randrange(len(lines) // 2), note)
    if hard:
        right = wardens[town]
        question = "Who is the warden at whose house the sealed map was left?"
        return Puzzle("Letters", "\n\n".join(lines), question, right, _others(rng, right, list(wardens.values())))
    question = "Who wrote to the registry about the sealed map?"
    return Puzzle("Letters", "\n\n".join(lines), question, lost, _others(rng, lost, people))


NOUNS = "river,house,stone,bird,road,lamp,hill,ship,tree,king,field,door".split(",")
QUALITIES = "red,old,small,cold,bright,quiet".split(",")


def language(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """A phrase book of an invented language: a word's meaning, or a phrase made by its rules."""

    def syllable() -> str:
        return rng.choice("bdfgklmnprstvz") + rng.choice("aeiou")

    coined: set[str] = set()
    while len(coined) < len(NOUNS) + len(QUALITIES):
        coined.add(syllable() + syllable() + rng.choice("lnrsk"))
    order = sorted(coined)
    rng.shuffle(order)
    lexicon = dict(zip([*NOUNS, *QUALITIES], order, strict=True))
    many = rng.choice(("im", "ot", "ey"))
    lines = [f"In this language the quality follows the thing, and the ending -{many} on the thing makes it many."]
    lines += [
        f"The word {word} means {meaning}." for meaning, word in sorted(lexicon.items(), key=lambda pair: pair[1])
    ]
    while _count(lines) < words:
        noun, quality, more = rng.choice(NOUNS), rng.choice(QUALITIES), rng.random() < 0.5
        foreign = f"{lexicon[noun]}{many if more else ''} {lexicon[quality]}"
        english = f"many {quality} {noun}s" if more else f"one {quality} {noun}"
        lines.append(f"A traveller wrote down: {foreign}, which is to say {english}.")
    if hard:
        noun, quality = rng.choice(NOUNS), rng.choice(QUALITIES)
        other = rng.choice([name for name in QUALITIES if name != quality])
        right = f"{lexicon[noun]}{many} {lexicon[quality]}"
        wrong = (
            f"{lexicon[quality]} {lexicon[noun]}{many}",
            f"{lexicon[noun]} {lexicon[quality]}{many}",
            f"{lexicon[noun]}{many} {lexicon[other]}",
        )
        question = f"How does one say 'many {quality} {noun}s' in this language?"
        return Puzzle("Phrase book", "\n".join(lines), question, right, wrong)
    noun = rng.choice(NOUNS)
    question = f"What does the word {lexicon[noun]} mean?"
    return Puzzle("Phrase book", "\n".join(lines), question, noun, _others(rng, noun, NOUNS))


TASKS = (
    "paint the signboard,mend the pump,count the benches,hire the fiddler,print the notices,borrow the tents,"
    "clean the chimney,order the candles"
).split(",")


def dialogue(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """A committee's talk: who took a task on, or where the fair ended up after several changes."""
    people = rng.sample(PEOPLE, 5)
    chatter = (
        "I hear the carrier is late again.",
        "We said as much last year, if I recall.",
        "Somebody ought to write that down.",
        "My cousin would disagree, but then he always does.",
        "That seems reasonable to me.",
        "Could we have the window open, please?",
        "Let us not go over the accounts again.",
        "I have nothing to add to that.",
    )
    tasks = rng.sample(TASKS, 5)
    owners = dict(zip(tasks, people, strict=True))
    places = rng.sample(PLACES, 5)
    lines: list[str] = []
    while _count(lines) < words:
        lines.append(f"{rng.choice(people)}: {rng.choice(chatter)} {rng.choice(chatter)}")
    size = len(lines)
    spots = sorted(rng.sample(range(size // 10, size), 5))
    for offset, (spot, place) in enumerate(zip(spots, places, strict=True)):
        verb = "Let us hold the fair at" if offset == 0 else "On second thoughts, move the fair to"
        lines.insert(spot + offset, f"{rng.choice(people)}: {verb} {place}. All agreed.")
    for task, owner in owners.items():
        lines.insert(rng.randrange(size), f"{owner}: I will {task} myself, leave it to me.")
    text = "\n".join(lines)
    if hard:
        return Puzzle("Meeting", text, "Where will the fair be held in the end?", places[-1], tuple(places[:3]))
    task = rng.choice(tasks)
    right = owners[task]
    return Puzzle("Meeting", text, f"Who promised to {task}?", right, _others(rng, right, people))


VERBS = "load,scale,merge,trim,shift,pack,weigh,fold,rank,clip".split(",")
THINGS = "frame,ledger,signal,batch,token,matrix,record,window".split(",")


def code(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """A small code base: which file defines a function, or what a chain of calls returns."""
    names = [f"{verb}_{thing}" for verb in VERBS for thing in THINGS]
    rng.shuffle(names)
    folders = "core,tools,store,views,jobs".split(",")
    parts: list[str] = []
    home: dict[str, str] = {}
    simple: dict[str, int] = {}
    while _count(parts) < words and len(names) > 7:
        file = f"{rng.choice(folders)}/{rng.choice(THINGS)}_{len(parts)}.py"
        body = [f"# file: {file}"]
        for name in (names.pop(), names.pop(), names.pop()):
            constant = rng.randint(2, 40)
            home[name], simple[name] = file, constant
            docstring = f"Return the {name.replace('_', ' of the ')}; {rng.choice(WEATHER).lower()}"
            body.append(
                f'def {name}(value):\n    """{docstring}"""\n    result = value + {constant}\n    return result\n'
            )
        parts.append("\n".join(body))
    while _count(parts) < words:
        parts.append(f"# file: docs/notes_{len(parts)}.txt\n" + " ".join(rng.choice(WEATHER) for _ in range(12)))
    if hard:
        first, second, third = rng.sample(sorted(simple), 3)
        start = rng.randint(1, 9)
        parts.append(f"# file: main.py\ndef run():\n    return {first}({second}({third}({start})))\n")
        right = start + simple[first] + simple[second] + simple[third]
        wrong = (right - start, right + 1, right - simple[third])
        question = "What does run() in main.py return?"
        return Puzzle("Code base", "\n".join(parts), question, str(right), tuple(str(number) for number in wrong))
    name = rng.choice(sorted(home))
    question = f"Which file defines the function {name}?"
    return Puzzle("Code base", "\n".join(parts), question, home[name], _others(rng, home[name], list(home.values())))


def table(rng: random.Random, words: int, hard: bool) -> Puzzle:
    """A table of shipments: the ship of one, or the port that received most."""
    ports = rng.sample(TOWNS, 5)
    ships = "Heron,Gannet,Petrel,Osprey,Curlew,Dunlin".split(",")
    rows: list[tuple[int, str, str, str, int]] = []
    number = rng.randint(1000, 2000)
    while 11 * len(rows) < words:
        number += rng.randint(1, 9)
        goods = rng.choice(GOODS).split()[-1]
        rows.append((number, rng.choice(ships), rng.choice(ports), goods, rng.randint(5, 95)))
    if hard:
        totals = {port: sum(row[4] for row in rows if row[2] == port) for port in ports}
        best = max(totals, key=lambda port: totals[port])
        rows.append((number + 1, "Heron", best, "ballast", 96))  # a margin, so that no two ports are level
        right, question = best, "Which port received the greatest total weight?"
        wrong = _others(rng, best, ports)
    else:
        row = rng.choice(rows)
        right, question = row[1], f"Which ship carried shipment {row[0]}?"
        wrong = _others(rng, right, ships)
    head = "| shipment | ship | port | goods | weight in tons |\n|---|---|---|---|---|\n"
    text = head + "\n".join(f"| {a} | {b} | {c} | {d} | {e} |" for a, b, c, d, e in rows)
    return Puzzle("Table", text, question, right, wrong)


MAKERS: dict[str, Maker] = {
    "Single-Document QA": chronicle,
    "Multi-Document QA": letters,
    "Long In-context Learning": language,
    "Long-dialogue History Understanding": dialogue,
    "Code Repository Understanding": code,
    "Long Structured Data Understanding": table,
}


def records() -> list[dict[str, str]]:
    """The set: each domain in both difficulties and all three sizes."""
    made: list[dict[str, str]] = []
    for domain, maker in MAKERS.items():
        for difficulty in ("easy", "hard"):
            for length, words in WORDS.items():
                number = len(made)
                rng = random.Random(f"{SEED}/{domain}/{difficulty}/{length}")
                puzzle = maker(rng, words, difficulty == "hard")
                # By the number alone, so that each letter is right equally often.
                answer = "ABCD"[(number * 3 + number // 4) % 4]
                wrong = list(puzzle.wrong)
                rng.shuffle(wrong)
                choices = {letter: puzzle.right if letter == answer else wrong.pop() for letter in "ABCD"}
                made.append(
                    {
                        "_id": f"self-made-{number:02d}",
                        "domain": domain,
                        "sub_domain": puzzle.sub_domain,
                        "difficulty": difficulty,
                        "length": length,
                        "question": puzzle.question,
                        **{f"choice_{letter}": choice for letter, choice in choices.items()},
                        "answer": answer,
                        "context": puzzle.context,
                    }
                )
    return made


def text() -> str:
    """The file's content, a record a line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records())


if __name__ == "__main__":
    (Path(__file__).parent / "small.jsonl").write_text(text(), encoding="utf-8")

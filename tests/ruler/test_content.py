"""Each reference can be derived from the prompt: every task is solved here by a literal reading of its text."""

import math
import random
import re
from collections import Counter

import pytest

from evalkit.benchmarks import ruler
from evalkit.benchmarks.ruler import TASKS, aggregation, niah, qa, vt

LENGTHS = (2048, 4096)
HEAD = "<|im_start|>user\n"
FOOT = "<|im_end|>\n<|im_start|>assistant\n"


def message(sample):
    """The user's message, checked to be the whole turn and followed by the answer prefix."""
    start = sample.prompt.index(HEAD) + len(HEAD)
    text, foot, prefix = sample.prompt[start:].rpartition(FOOT)
    assert foot and prefix == sample.answer_prefix
    return text


def pattern(template, **groups):
    """A regular expression of a template's fixed text with named groups for its fields."""
    text = re.escape(template)
    for name, group in groups.items():
        first, text = True, text.replace(re.escape("{" + name + "}"), "\0" + name + "\0")
        while f"\0{name}\0" in text:
            text = text.replace(f"\0{name}\0", f"(?P<{name}>{group})" if first else f"(?P={name})", 1)
            first = False
    return re.compile(text, re.S)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles(builders, task, length):
    setting = niah.SETTINGS[task]
    single = setting.num_needle_q * setting.num_needle_v == 1
    for index in range(4):
        sample = builders(task, length).sample(index)
        text = message(sample)
        kind = setting.values[:-1] if single else setting.values
        first = f"A special magic {kind} is hidden" if single else f"Some special magic {kind} are hidden"
        start = f"{first} within the following text. Make sure to memorize it. "
        assert text.startswith(start + f"I will quiz you about the {kind} afterwards.\n")
        verb = "is" if single else "are"
        question = (
            rf"\nWhat {verb}{'' if single else ' all'} the special magic {kind} for (.*) mentioned in the provided "
        )
        asked = re.search(question + r"text\?$", text).group(1)
        assert sample.answer_prefix == f"The special magic {kind} for {asked} mentioned in the provided text {verb}"
        needles = re.findall(rf"One of the special magic {setting.values} for (.+?) is: (\S+)\.", text)
        keys = re.split(r", and |, ", asked)
        assert len(keys) == setting.num_needle_q
        found = {key: [value for name, value in needles if name == key] for key in keys}
        assert sorted(value for values in found.values() for value in values) == sorted(sample.references)
        assert all(len(values) == setting.num_needle_v for values in found.values())
        number = (
            r"[1-9]\d{6}"
            if setting.values == "numbers"
            else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
        )
        assert all(re.fullmatch(number, reference) for reference in sample.references)
        body = text[text.index("afterwards.\n") + len("afterwards.\n") : text.rindex("\nWhat")]
        planted = setting.num_needle_k * setting.num_needle_v
        if setting.haystack == "noise":
            lines = body.split("\n")
            assert Counter(line == niah.NOISE for line in lines) == {True: sample.units, False: planted}
        elif setting.haystack == "needle":
            assert len(body.split("\n")) == sample.units + planted == len(needles)
            assert len({key for key, _ in needles}) == len(needles), "a key occurs twice"
        else:
            assert len(needles) == planted
            # Without the needles the context is the essays, from their start, word for word.
            rest = re.sub(rf" ?One of the special magic {setting.values} for (.+?) is: (\S+)\.", "", body).strip()
            words = builders(task, length).context.corpora.essays
            assert rest == " ".join(words[: sample.units])


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needle_depths_cover_the_haystack(builders, task):
    builder = builders(task, 2048)
    places = []
    for index in range(60):
        sample = builder.sample(index)
        text = message(sample)
        places.append(text.index(f" is: {sample.references[0]}.") / len(text))
    assert min(places) < 0.2 and max(places) > 0.8 and 0.35 < sum(places) / len(places) < 0.65


def test_decoys_never_use_the_key_asked_for(renderers, corpora, monkeypatch):
    # With forty possible keys nearly every pool holds the needle's own key.
    words = corpora.words
    monkeypatch.setitem(corpora.__dict__, "words", type(words)(words.nouns[:20], words.adjectives[:2], ()))
    for sample in ruler.build("niah_multikey_2", 1024, 12, seed=7, renderer=renderers("smollm2-chat"), corpora=corpora):
        keys = re.findall(r"One of the special magic numbers for (.+?) is:", message(sample))
        assert len(set(keys)) == len(keys)


def test_essay_needles_sit_between_sentences(builders):
    for index in range(20):
        text = message(builders("niah_multikey_1", 4096).sample(index))
        for match in re.finditer("One of the special", text):
            before = text[: match.start()]
            if re.fullmatch(r"One of .*?\d{7}\.\nWhat is .*", text[match.start() :], re.S):
                continue  # at 100 % it follows whatever word the haystack was cut at
            assert before.endswith("afterwards.\n") or re.search(r"[.!?][\"')\]\u201d\u2019]* $", before)


def test_sentences():
    text = 'He met Dr. Smith at 5 p.m. today. "Yes!" she said. U.S. Steel (e.g. Mills.) Then J. K. left? now He ran.'
    words = text.split()
    starts = niah.sentence_starts(words)
    assert [" ".join(words[a:b]) for a, b in zip(starts, [*starts[1:], len(words)], strict=True)] == [
        "He met Dr. Smith at 5 p.m. today.",
        '"Yes!" she said.',
        "U.S. Steel (e.g. Mills.)",
        "Then J. K. left? now He ran.",
    ]


def resolve(lines, value):
    """Interpret assignments line by line: names that hold ``value``."""
    holds = {}
    for line in lines:
        if match := re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d{5}))", line):
            name, source, number = match.groups()
            holds[name] = holds[source] if source else number
    return [name for name, held in holds.items() if held == value]


@pytest.mark.parametrize("length", LENGTHS)
def test_variable_tracking(builders, length):
    task = pattern(vt.TEMPLATE, context=".*?", query=r"\d{5}")
    for index in range(6):
        sample = builders("vt", length).sample(index)
        text = message(sample)
        example, separator, main = text.partition("\n\nMemorize and track")
        assert separator
        shown = re.fullmatch(
            task.pattern
            + re.escape(f" {vt.ANSWER_PREFIX}").replace(r"\{num_v\}", "5").replace(r"\{query\}", "(?P=query)")
            + " (?P<answer>.*)",
            example,
            re.S,
        )
        solved = task.fullmatch("Memorize and track" + main)
        assert shown and solved
        names = resolve(shown["context"].split("\n"), shown["query"])
        assert names == shown["answer"].split() and len(names) == 5 and all(len(name) == 3 for name in names)
        lines = solved["context"].split("\n")
        assert resolve(lines, solved["query"]) == list(sample.references)
        assert len(set(sample.references)) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in sample.references)
        assert shown["query"] != solved["query"] and not set(names) & set(sample.references)
        assert Counter(line == niah.NOISE for line in lines) == {True: sample.units, False: 5}
        assert sample.answer_prefix == vt.ANSWER_PREFIX.format(num_v=5, query=solved["query"])


def test_variable_tracking_example_avoids_the_value_asked_for():
    def value(avoid=None):
        return int(re.search(r"assigned the value (\d{5})", vt.example(random.Random(3), 5, avoid)[0]).group(1))

    drawn = value()
    assert value(avoid=drawn + 1) == drawn and value(avoid=drawn) != drawn and 10000 <= value(avoid=drawn) <= 99998


def test_variable_tracking_example_is_as_long_as_officially(builders):
    builder = builders("vt", 4096)
    count, size = builder.context.renderer.count, vt.example_size(builder.context)
    example = message(builder.sample(0)).partition("\n\nMemorize")[0]
    assert example.count(niah.NOISE) == size > 5
    assert count(example) <= vt.EXAMPLE_TOKENS + 20 and count(example + (niah.NOISE + "\n") * 2) > vt.EXAMPLE_TOKENS


@pytest.mark.parametrize("length", LENGTHS)
def test_common_words(builders, length):
    task = pattern(aggregation.CWE_TEMPLATE, context=".*?")
    (shown_words, shown_common, shown_uncommon), (common, uncommon) = aggregation.repeats(length)
    for index in range(4):
        sample = builders("cwe", length).sample(index)
        shown, solved = task.finditer(message(sample))

        def count(listed):
            numbered = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", listed)
            assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
            return Counter(word for _, word in numbered)

        frequency = count(solved["context"])
        assert {word for word, times in frequency.items() if times == common} == set(sample.references)
        assert sorted(set(frequency.values())) == [uncommon, common]
        assert len(frequency) == sample.units and len(sample.references) == 10
        example = count(shown["context"])
        answer = message(sample)[shown.end() : solved.start()]
        expected = [word for word, times in example.items() if times == shown_common]
        assert answer.startswith(f" {aggregation.CWE_ANSWER_PREFIX} 1. ") and answer.endswith("\n")
        assert set(count(answer[len(aggregation.CWE_ANSWER_PREFIX) + 2 : -1])) == set(expected)
        assert len(example) == shown_words and set(example.values()) == {shown_common, shown_uncommon}


@pytest.mark.parametrize("length", [512, *LENGTHS])
def test_frequent_words(builders, length):
    task = pattern(aggregation.FWE_TEMPLATE, context=".*?")
    for index in range(4):
        sample = builders("fwe", length).sample(index)
        frequency = Counter(task.fullmatch(message(sample))["context"].split(" "))
        assert frequency.pop("...") == math.floor(sample.units / (math.pi**2 / 6))
        ranked = frequency.most_common(4)
        assert [word for word, _ in ranked[:3]] == list(sample.references)
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1], "the answer must be decided"
        assert all(re.fullmatch("[a-z]{6}", word) for word in frequency)


def test_zipf_counts_known_values():
    # 1000 / zeta(2) = 607.9; then a quarter, a ninth, a sixteenth of it, rounded down.
    assert aggregation.zipf_counts(1000, 6).tolist() == [607, 151, 67, 37, 24, 16]


@pytest.mark.parametrize(("task", "length"), [("qa_1", 2048), ("qa_1", 4096), ("qa_2", 2048), ("qa_2", 4096)])
def test_question_answering(builders, task, length):
    builder = builders(task, length)
    corpus = getattr(builder.context.corpora, qa.CORPUS[task])
    form = pattern(qa.TEMPLATE, context=".*?", query=".*")
    for index in range(5):
        sample = builder.sample(index)
        found = form.fullmatch(message(sample))
        question = corpus.questions[index]
        assert found["query"] == question.query and sample.references == question.answers and sample.metric == "any"
        parts = re.split(r"(?:^|\n\n)Document (\d+):\n", found["context"])
        assert [int(number) for number in parts[1::2]] == list(range(1, sample.units + 1))
        shown = parts[2::2]
        assert len(set(shown)) == len(shown) and set(shown) <= set(corpus.documents)
        assert all(corpus.documents[i] in shown for i in question.documents)
        if task == "qa_1":
            assert all(any(answer in document for document in shown) for answer in sample.references)
            # Related paragraphs of the article come before any others.
            related = sum(corpus.documents[i] in shown for i in question.related)
            assert related == min(len(question.related), sample.units - 1)


def test_documents_are_shuffled(builders):
    builder = builders("qa_1", 4096)
    corpus = builder.context.corpora.squad
    spots = []
    for index in range(12):
        text = message(builder.sample(index))
        spots.append(text.index(corpus.documents[corpus.questions[index].documents[0]]) / len(text))
    assert max(spots) - min(spots) > 0.5

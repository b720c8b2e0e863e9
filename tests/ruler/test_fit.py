"""The fit: exact counts, never over, maximal; and what a sample does and does not depend on."""

import random

import pytest

from evalkit.benchmarks import ruler
from evalkit.benchmarks.ruler.fit import Draft, _largest
from evalkit.errors import InputError

CHEAP = ("smollm2-chat", "smollm2-raw", "llama3-chat", "llama3-raw", "qwen3-chat", "qwen3-thinking")


def check(builder, index):
    """Count a sample as a whole, and the same sample with one more unit."""
    sample, renderer = builder.sample(index), builder.context.renderer
    assert renderer.count(sample.prompt) == sample.prompt_tokens
    assert sample.prompt_tokens + sample.max_new_tokens <= sample.length
    assert builder.prompt(index, sample.units) == sample.prompt
    assert renderer.count(builder.prompt(index, sample.units + 1)) + sample.max_new_tokens > sample.length
    ids = renderer.encode(sample.prompt)
    assert renderer.leading_bos(ids) == renderer.expected_leading_bos
    assert sample.prompt.endswith((sample.answer_prefix, sample.answer_prefix.rstrip()))
    return sample


@pytest.mark.parametrize("form", CHEAP)
@pytest.mark.parametrize("task", ruler.TASKS)
def test_fit_is_exact_and_maximal(builders, task, form):
    # The trained vocabularies are small, so common words and ten paragraphs need more room.
    lengths = {"qa_2": (5000,), "cwe": (3000, 6000)}.get(task, (1500, 4096))
    lengths = (3000, 8192) if form == "smollm2-chat" else lengths
    for length in lengths:
        builder = builders(task, length, form)
        builder.verify([0])
        assert builder.exact is False, "costs must add up for tokenizers with a pre-tokenizer"
        for index in range(3):
            sample = check(builder, index)
            if length >= 8192 and not task.startswith("qa"):
                assert sample.prompt_tokens + sample.max_new_tokens >= 0.97 * length


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3", "niah_multikey_1", "vt", "cwe", "fwe", "qa_1"])
def test_tokenizer_without_pretokenizer_is_counted_in_full(builders, task):
    """Tokens that span units break additivity; it must be noticed, and the fit stay exact and maximal."""
    builder = builders(task, 1200, "unsplit-raw")
    samples = list(builder.samples(0, 2))
    assert builder.exact is True
    for sample in samples:
        assert check(builder, sample.index) == sample


def test_full_counting_and_adding_up_agree(builders):
    for task in ("niah_single_2", "niah_multikey_2", "cwe", "fwe", "vt", "qa_1"):
        fast, full = builders(task, 2048), builders(task, 2048, exact=True)
        assert [fast.sample(i) for i in range(2)] == [full.sample(i) for i in range(2)]


def test_128k_once(builders):
    for task in ("vt", "niah_multiquery"):
        sample = check(builders(task, 131072), 3)
        assert sample.prompt_tokens + sample.max_new_tokens >= 0.999 * 131072


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_2", "vt", "cwe", "fwe", "qa_1"])
def test_sample_depends_on_its_coordinates_only(renderers, corpora, task):
    arguments = {"renderer": renderers("smollm2-chat"), "corpora": corpora}
    base = ruler.build(task, 2048, 4, seed=7, **arguments)
    # Global generators have no say, nor have other tasks, other lengths, the limit or the starting point.
    random.seed(0)
    ruler.build("vt", 1024, 1, seed=7, **arguments)
    assert ruler.build(task, 2048, 2, seed=7, **arguments) == base[:2]
    assert ruler.build(task, 2048, 2, seed=7, start=2, **arguments) == base[2:]
    assert [sample.index for sample in base] == [0, 1, 2, 3]
    assert len({sample.prompt for sample in base}) == 4
    other_seed = ruler.build(task, 2048, 1, seed=8, **arguments)[0]
    assert other_seed.prompt != base[0].prompt


def test_building_leaves_the_global_generator_alone(builders):
    random.seed(123)
    expected = random.random()
    random.seed(123)
    builders("niah_multikey_2", 1024, seed=99).sample(0)
    assert random.random() == expected


@pytest.mark.parametrize("task", ruler.TASKS)
def test_too_short_is_one_error_naming_task_length_and_minimum(renderers, corpora, task):
    arguments = {"seed": 7, "renderer": renderers("smollm2-chat"), "corpora": corpora}
    with pytest.raises(InputError, match=rf"task\.length=200: too short for {task}: .* at least (\d+) tokens") as error:
        ruler.build(task, 200, 1, **arguments)
    message = str(error.value)
    assert "\n" not in message
    minimum = int(message.split("at least ")[1].split()[0])
    assert minimum > 200
    # A little more than that is enough: the draws change with the length, and with them the tokens.
    length = minimum + 150
    if task == "qa_2":
        length = minimum
        with pytest.raises(InputError, match=f"at least {minimum} tokens"):
            ruler.build(task, minimum - 1, 1, **arguments)
    sample = ruler.build(task, length, 1, **arguments)[0]
    assert sample.prompt_tokens + sample.max_new_tokens <= length


def test_the_stated_minimum_covers_all_samples(renderers, corpora):
    arguments = {"seed": 7, "renderer": renderers("smollm2-chat"), "corpora": corpora}
    # Ten paragraphs of any question: the first six questions fit 2048 tokens, the seventh does not.
    assert len(ruler.build("qa_2", 2048, 6, **arguments)) == 6
    with pytest.raises(InputError, match="too short for qa_2: samples 0 to 9 need at least 3245 tokens, 32 of them"):
        ruler.build("qa_2", 2048, 10, **arguments)
    assert len(ruler.build("qa_2", 3245, 10, **arguments)) == 10


def test_longer_than_the_word_lists(renderers, corpora, monkeypatch):
    words = corpora.words
    few = type(words)(words.nouns[:60], words.adjectives[:5], words.verbs[:5])
    monkeypatch.setitem(corpora.__dict__, "words", few)
    with pytest.raises(InputError, match="task.length=16384: too long for cwe: the word lists end at"):
        ruler.build("cwe", 16384, 1, seed=7, renderer=renderers("smollm2-chat"), corpora=corpora)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "niah_single_4"}, r"task\.tasks='niah_single_4': did you mean .*niah_single_1"),
        ({"length": 0}, r"task\.length=0"),
        ({"length": 4096.5}, r"task\.length=4096\.5"),
        ({"count": 0}, r"task\.limit=0"),
        ({"seed": -1}, r"task\.seed=-1"),
        ({"seed": True}, r"task\.seed=True"),
        ({"start": -1}, r"start=-1"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0"),
    ],
)
def test_bad_arguments(renderers, corpora, arguments, message):
    good = {
        "task": "vt",
        "length": 2048,
        "count": 1,
        "seed": 7,
        "renderer": renderers("smollm2-chat"),
        "corpora": corpora,
    }
    with pytest.raises(InputError, match=message):
        ruler.build(**{**good, **arguments})


def test_reserve_can_be_raised(renderers, corpora):
    arguments = {"seed": 7, "renderer": renderers("qwen3-thinking"), "corpora": corpora}
    usual = ruler.build("vt", 4096, 1, **arguments)[0]
    longer = ruler.build("vt", 4096, 1, max_new_tokens=1000, **arguments)[0]
    assert longer.max_new_tokens == 1000 and longer.prompt_tokens + 1000 <= 4096 < usual.prompt_tokens + 1000
    assert usual.answer_prefix == "" and usual.prompt.endswith("<|im_start|>assistant\n")


def test_search_keeps_its_invariants_for_any_guess_and_any_shape():
    rng = random.Random(5)
    for _ in range(300):
        sizes, value = [], rng.randint(1, 30)
        for _ in range(rng.randint(2, 200)):
            sizes.append(value)
            value += rng.choice([-1, 0, 1, 5, 40])
        sizes += [10**6] * 5
        draft = Draft("", (), 0, user=str, added=int, maximum=len(sizes) - 1)
        room = sizes[0] + rng.randint(0, 800)
        found = _largest(lambda n: sizes[n], room, draft, guess=rng.randrange(-3, len(sizes) + 3))  # noqa: B023
        assert sizes[found] <= room < sizes[found + 1]


def test_search_ends_when_units_cost_nothing():
    draft = Draft("", (), 0, user=str, added=int)
    with pytest.raises(RuntimeError, match="adds no tokens"):
        _largest(lambda n: 1, 10, draft, guess=0)

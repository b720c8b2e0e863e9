import hashlib
import json

import pytest

from evalkit.corpora import Corpora
from evalkit.errors import InputError

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Normandy is in France.",
                    "qas": [
                        {
                            "question": "Where?",
                            "is_impossible": False,
                            "answers": [{"text": "France"}, {"text": "in France"}],
                        },
                        {"question": "Never?", "is_impossible": True, "answers": []},
                    ],
                },
                {"context": "A second paragraph.", "qas": []},
            ]
        },
        {"paragraphs": [{"context": "Another article.", "qas": []}]},
    ]
}
HOTPOT = [
    {"question": "Who?", "answer": "Ed", "context": [["Ed Wood", ["He is Ed.", " He made films."]], ["B", ["b."]]]},
    {"question": "What?", "answer": "c", "context": [["B", ["b."]], ["C", ["c."]]]},
]


def write(tmp_path, name, content):
    path = tmp_path / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture(scope="module")
def embedded():
    return Corpora()


def test_embedded_corpora_have_the_published_sizes(embedded):
    assert len(embedded.essays) == 525448 and embedded.essays[:3] == ("April", "2012A", "palliative")
    assert "  " not in embedded.essays_text and "\n" not in embedded.essays_text
    # SQuAD v2 dev: 5,928 of 11,873 questions can be answered, from 1,204 distinct paragraphs.
    assert len(embedded.squad.questions) == 5928 and len(embedded.squad.documents) == 1204
    assert len(embedded.hotpotqa.questions) == 7405 and len(embedded.hotpotqa.documents) == 66635
    words = embedded.words
    assert (len(words.nouns), len(words.adjectives), len(words.verbs)) == (6782, 912, 1042)
    for name in ("essays", "squad", "hotpotqa", "words"):
        assert len(embedded.sha256(name)) == 64
    first = embedded.squad.questions[0]
    assert first.query == "In what country is Normandy located?" and first.answers[0] == "France"
    assert "Normandy" in embedded.squad.documents[first.documents[0]]


def test_answers_are_in_the_documents_of_their_question(embedded):
    for question in embedded.squad.questions[::97]:
        text = embedded.squad.documents[question.documents[0]]
        assert all(answer in text for answer in question.answers)
        assert question.documents[0] not in question.related


def test_local_files_of_the_same_form(tmp_path):
    essays = write(tmp_path, "essays", {"text": "One  two\n\nthree. "})
    corpora = Corpora(essays=essays, squad=write(tmp_path, "squad", SQUAD), hotpotqa=write(tmp_path, "hotpot", HOTPOT))
    assert corpora.essays == ("One", "two", "three.") and corpora.essays_text == "One two three."
    assert corpora.sha256("essays") == hashlib.sha256(essays.read_bytes()).hexdigest()
    squad = corpora.squad
    assert squad.documents == ("A second paragraph.", "Another article.", "Normandy is in France.")
    assert [(q.query, q.answers, q.documents, q.related) for q in squad.questions] == [
        ("Where?", ("France", "in France"), (2,), (0,))
    ]
    hotpot = corpora.hotpotqa
    assert hotpot.documents == ("B\nb.", "C\nc.", "Ed Wood\nHe is Ed. He made films.")
    assert hotpot.questions[0].documents == (2, 0) and hotpot.questions[1].answers == ("c",)


def broken(data, *path):
    data = json.loads(json.dumps(data))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return data


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("essays", {"texts": "x"}, 'missing field "text"'),
        ("essays", {"text": 3}, '"text" must be a string'),
        ("essays", {"text": "  "}, "empty"),
        ("essays", "{not json", "not JSON"),
        ("squad", {}, "missing field data"),
        ("squad", {"data": {}}, "field data must be a list"),
        ("squad", broken(SQUAD, "data", 1, "paragraphs"), r"missing field data\[1\]\.paragraphs"),
        ("squad", broken(SQUAD, "data", 0, "paragraphs", 1, "context"), r"data\[0\]\.paragraphs\[1\]\.context"),
        (
            "squad",
            broken(SQUAD, "data", 0, "paragraphs", 0, "qas", 1, "is_impossible"),
            r"missing field data\[0\]\.paragraphs\[0\]\.qas\[1\]\.is_impossible",
        ),
        ("hotpotqa", {"a": 1}, "a list of questions"),
        ("hotpotqa", broken(HOTPOT, 1, "answer"), r"missing field \[1\]\.answer"),
        ("hotpotqa", [{**HOTPOT[0], "context": [["title"]]}], r"\[0\]\.context must hold"),
        ("hotpotqa", [], "no question"),
    ],
)
def test_bad_files_name_what_is_wrong(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(InputError, match=message) as error:
        getattr(Corpora(**{name: path}), name)
    assert f"task.data.{name}" in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"data\.squad.*No such file"):
        Corpora(squad=tmp_path / "none.json").sha256("squad")

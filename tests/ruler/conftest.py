import pytest
from small_tokenizers import llama3_like, qwen3_like, smollm2, unsplit

from evalkit.benchmarks.ruler.samples import Builder
from evalkit.corpora import Corpora
from evalkit.prompts import PromptRenderer

FORMATS = {
    "smollm2-chat": (smollm2, {"chat": True}),
    "smollm2-raw": (smollm2, {"chat": False}),
    "llama3-chat": (llama3_like, {"chat": True}),
    "llama3-raw": (llama3_like, {"chat": False}),
    "qwen3-chat": (qwen3_like, {"chat": True, "thinking": False}),
    "qwen3-thinking": (qwen3_like, {"chat": True, "thinking": True}),
    "unsplit-raw": (unsplit, {"chat": False}),
}


@pytest.fixture(scope="session")
def corpora():
    return Corpora()


@pytest.fixture(scope="session")
def renderers():
    """Renderers by name, made when first asked for."""
    made = {}

    def get(name):
        if name not in made:
            tokenizer, options = FORMATS[name]
            made[name] = PromptRenderer(tokenizer(), **options)
        return made[name]

    return get


@pytest.fixture(scope="session")
def builders(renderers, corpora):
    """Builders by (task, length, format, seed), made when first asked for."""
    made = {}

    def get(task, length, form="smollm2-chat", seed=7, **options):
        key = (task, length, form, seed, *options.items())
        if key not in made:
            made[key] = Builder(task, length, seed=seed, renderer=renderers(form), corpora=corpora, **options)
        return made[key]

    return get

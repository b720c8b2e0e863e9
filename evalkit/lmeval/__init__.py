"""The harness's model inside lm-eval: ``--model evalkit`` on lm-eval's own command line, with its own tasks.

* :mod:`.settings`: model arguments to a validated model, method and execution,
* :mod:`.model`: the model class: sparse prefill of the context, dense decode of what follows,
* :mod:`.budget`: the realized budget in lm-eval's results and samples files,
* :mod:`.hook`: a look at model and tasks before lm-eval evaluates them,
* :mod:`.metadata`: which keys of ``--metadata`` a task knows,
* :mod:`.prompt_cache`: lm-eval's cache of built prompts, keyed by the metadata and the documents too,
* :mod:`.cli`: the console command that registers the model and then is lm_eval.
"""

from __future__ import annotations

NAME = "evalkit"
TARGET = "evalkit.lmeval.model:SparsePrefillLM"


def register() -> None:
    """Make ``--model evalkit`` known to lm-eval in this process, beside its own models; may be called again."""
    # lm-eval fills its registry with its own models only while that is empty: they come first.
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)

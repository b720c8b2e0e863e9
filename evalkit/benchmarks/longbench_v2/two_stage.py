"""The two-stage chain of thought as an lm-eval task of its own: what the second stage needs travels with the request.

lm-eval sends a model requests that do not depend on each other. So the question goes along in the generation arguments,
which lm-eval hands through as they are and counts in the key of its response cache, and a model of ours asks the second
stage by itself. Every other model is refused: it would answer the first stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from ...errors import InputError
from ...lmeval.budget import Chain
from ...lmeval.hook import before_evaluation
from .data import Item, Question
from .prompts import ANSWER_TOKENS

ARGUMENT = "second_stage"
"""Name among the generation arguments."""


class TwoStageTask(ConfigurableTask):
    """A task of the ``cot`` mode; under ``evalkit run`` its documents name prepared prompts and nothing is added."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})
        before_evaluation("two stages", refuse_other_models)

    @property
    def prepared(self) -> bool:
        """Whether the harness prepared the prompts, and runs them."""
        return (self.config.metadata or {}).get("docs") is not None

    def build_all_requests(self, *, system_instruction: str | None = None, **kwargs: Any) -> None:
        """Build lm-eval's requests.

        Raises:
            InputError: a system instruction, which the second stage's prompt would lack.
        """
        if system_instruction and not self.prepared:
            raise InputError("system_instruction", system_instruction, f"none with {self.config.task}: two prompts")
        super().build_all_requests(system_instruction=system_instruction, **kwargs)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """The request of the first stage, with what the second one needs."""
        request = super().construct_requests(doc, ctx, **kwargs)
        if not self.prepared:
            context, arguments = request.arguments
            second = {name: doc[name] for name in ("question", "choices")}
            second |= {"chat": bool(kwargs.get("apply_chat_template")), "max_gen_toks": ANSWER_TOKENS}
            request.arguments = (context, {**arguments, ARGUMENT: second})
        return request


def fields_of(item: Item) -> dict[str, Any]:
    """What a document holds for the second stage."""
    return {"question": item.question, "choices": list(item.choices)}


def question_of(second: Mapping[str, Any]) -> Question:
    """The question in the argument of a request."""
    a, b, c, d = (str(choice) for choice in second["choices"])
    return Question(str(second["question"]), (a, b, c, d))


def refuse_other_models(model: Any, tasks: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` where a two-stage task would run on a model that knows one stage."""
    if getattr(model, "two_stages", False):
        return
    for task in tasks.values():
        if isinstance(task, TwoStageTask) and not task.prepared:
            raise _refused(type(model).__name__)


def answers(responses: Sequence[Sequence[Any]], docs: Sequence[Mapping[str, Any]]) -> list[str]:
    """lm-eval's filter of the ``cot`` mode: of a chain the answer alone, which is what is judged."""
    return [_answer(response[0], doc) for response, doc in zip(responses, docs, strict=True)]


def _answer(response: Any, doc: Mapping[str, Any]) -> str:
    if isinstance(response, Chain):
        return response.answer
    if "message" in doc:  # no prepared prompt, and no second stage
        raise _refused(type(response).__name__)
    return str(response)


def _refused(found: str) -> InputError:
    allowed = (
        "evalkit: longbench_v2_cot asks twice, the second time with the model's own reasoning, and other models of "
        "lm-eval would answer the first question alone; or evalkit run task=longbench-v2-cot"
    )
    return InputError("model", found, allowed)
